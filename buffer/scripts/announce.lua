-- member id, its description, milliseconds until it expires
call('HDEL', MEMBER_FACTS, '') -- a full server accepts writes that follow a deletion
local time = call('TIME')
call('ZADD', MEMBERS, time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3], ARGV[1])
call('HSET', MEMBER_FACTS, ARGV[1], ARGV[2])
