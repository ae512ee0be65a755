-- fence
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
redis.call('HSET', STATE, 'learner_expires', 0)
redis.call('PUBLISH', ON_LEARNER, '')
