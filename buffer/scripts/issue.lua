-- fence -> the next version number
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
local version = get('highest', -1) + 1
redis.call('HSET', STATE, 'highest', version)
return version
