-- limits as name and value in turn
even_when_full()
call('HSET', OVERRIDES, unpack(ARGV))
call('HSET', STATE, unpack(ARGV))
wake_workers()
call('PUBLISH', ON_READY, '')
