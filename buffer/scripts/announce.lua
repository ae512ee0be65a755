-- member id, its description, milliseconds until it expires -> the live version's row of the version table, if there is one
call('HDEL', MEMBER_FACTS, '') -- a full server accepts writes that follow a deletion
call('ZADD', MEMBERS, now_ms() + ARGV[3], ARGV[1])
call('HSET', MEMBER_FACTS, ARGV[1], ARGV[2])
-- Workers may read but not write the version table, so its key is not declared.
local live, versions = call('HGET', STATE, 'live'), string.gsub(STATE, 'state$', 'versions')
return live and call('HGET', versions, live)
