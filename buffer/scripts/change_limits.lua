-- limits as name and value in turn; "" for no limit, "auto" for the learner's choice from its next decision on
even_when_full()
for index = 1, #ARGV, 2 do
  if ARGV[index + 1] == 'auto' then call('HDEL', OVERRIDES, ARGV[index]) else call('HSET', OVERRIDES, ARGV[index], ARGV[index + 1]) end
end
apply_limits(ARGV, 1)
wake_workers()
call('PUBLISH', ON_READY, '')
