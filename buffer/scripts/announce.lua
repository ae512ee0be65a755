-- member id, its description, milliseconds until it expires
call('HDEL', MEMBER_FACTS, '') -- a full server accepts writes that follow a deletion
call('ZADD', MEMBERS, now_ms() + ARGV[3], ARGV[1])
call('HSET', MEMBER_FACTS, ARGV[1], ARGV[2])
