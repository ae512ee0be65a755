-- member id, what it says, for how many milliseconds
call('HDEL', MEMBER_FACTS, '') -- a full server lets what follows a deletion pass
local time = call('TIME')
call('ZADD', MEMBERS, time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3], ARGV[1])
call('HSET', MEMBER_FACTS, ARGV[1], ARGV[2])
