-- fence, step
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
for _, id in ipairs(redis.call('ZRANGEBYSCORE', TAKEN, '-inf', ARGV[2])) do spend(id) end
wake_workers()
