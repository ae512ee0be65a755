-- fence, lease ms
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
call('HSET', LEARNER, 'expires', now_ms() + ARGV[2])
call('HINCRBY', LEARNER, 'renewals', 1)
call('PUBLISH', ON_LEARNER, '')
