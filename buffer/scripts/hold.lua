-- fence, lease ms
call('HSET', LEARNER, 'expires', now_ms() + ARGV[2])
call('HINCRBY', LEARNER, 'renewals', 1)
call('PUBLISH', ON_LEARNER, '')
