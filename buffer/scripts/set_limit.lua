-- fence, name, value: applies until the next learner starts. An operator's pace ends the automatic one.
if ARGV[2] == 'pace' and call('HEXISTS', OVERRIDES, 'pace') == 1 then return end
if call('HGET', STATE, ARGV[2]) == ARGV[3] then return end
call('HSET', STATE, ARGV[2], ARGV[3])
wake_workers()
call('PUBLISH', ON_READY, '')
