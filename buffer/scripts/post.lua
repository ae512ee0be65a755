-- how many messages are kept, the message
redis.call('XDEL', KEYS[1], '0-0') -- a full server lets what follows a deletion pass
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'message', ARGV[2])
