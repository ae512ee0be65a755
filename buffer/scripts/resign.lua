-- fence
call('HSET', LEARNER, 'expires', 0)
call('PUBLISH', ON_LEARNER, '')
