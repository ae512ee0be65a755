-- fence, max_age: applies until the next learner starts
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
call('HSET', STATE, 'max_age', ARGV[2])
wake_workers()
call('PUBLISH', ON_READY, '')
