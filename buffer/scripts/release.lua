-- fence, step
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
redis.call('HSET', STATE, 'released', math.max(get('released', -1), tonumber(ARGV[2])))
wake_workers()
