-- fence, lease ms
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
call('HSET', STATE, 'learner_expires', now_ms() + ARGV[2])
call('HINCRBY', STATE, 'learner_renewals', 1)
call('PUBLISH', ON_LEARNER, '')
