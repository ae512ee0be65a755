-- fence, max_age: applies until the next learner starts
call('HSET', STATE, 'max_age', ARGV[2])
wake_workers()
call('PUBLISH', ON_READY, '')
