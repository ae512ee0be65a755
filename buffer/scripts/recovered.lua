-- fence, step, highest version, next ticket, next task, tasks that ended untrained, mark, changes of the mix as "AT ID JSON"...
-- -> highest version
local step, highest = tonumber(ARGV[2]), math.max(get('highest', -1), tonumber(ARGV[3]))
local next_task = math.max(get('next_task', 0), tonumber(ARGV[5]))
if is_frozen() then -- the server is older: it takes over the checkpoint's numbers
  next_task = tonumber(ARGV[5])
  call('HSET', STATE, 'untrained', ARGV[6], 'marks', ARGV[7])
  call('HINCRBY', STATE, 'set_backs', 1)
  call('DEL', MIX)
  for index = 8, #ARGV do call('RPUSH', MIX, ARGV[index]) end
end
call('HSET', STATE, 'step', math.max(step, 0), 'released', step, 'saved', step, 'highest', highest,
  'next_ticket', math.max(get('next_ticket', 0), tonumber(ARGV[4])), 'next_task', next_task)
call('HDEL', STATE, 'recovering', 'starving')
wake_workers()
return highest
