-- milliseconds until the key expires, its value
redis.call('DEL', KEYS[1]) -- a full server lets what follows a deletion pass
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
redis.call('PUBLISH', KEYS[1], '')
