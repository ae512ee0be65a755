-- member id
call('ZREM', MEMBERS, ARGV[1])
call('HDEL', MEMBER_FACTS, ARGV[1])
