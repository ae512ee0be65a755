-- fence
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
call('HSET', LEARNER, 'expires', 0)
call('PUBLISH', ON_LEARNER, '')
