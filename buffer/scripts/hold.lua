-- fence, lease ms
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
redis.call('HSET', STATE, 'learner_expires', now_ms() + ARGV[2])
redis.call('HINCRBY', STATE, 'learner_renewals', 1)
redis.call('PUBLISH', ON_LEARNER, '')
