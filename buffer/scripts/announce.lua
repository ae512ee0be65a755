-- member id, what it says, for how many milliseconds
redis.call('HDEL', KEYS[3], '') -- a full server lets what follows a deletion pass
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
