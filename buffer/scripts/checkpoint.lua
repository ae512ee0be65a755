-- fence, step -> groups of these steps that are still to be ended: if any, call again
local step = tonumber(ARGV[2])
call('HSET', STATE, 'saved', math.max(get('saved', -1), step))
call('HDEL', STATE, 'starving')
release(step) -- a spent group holds no slot
for _, id in ipairs(call('ZRANGEBYSCORE', TAKEN, '-inf', step, 'LIMIT', 0, AT_ONCE)) do
  local record = read(id)
  if record and record.state == 'taken' then spend(id, record) end
  call('ZREM', TAKEN, id) -- also a ticket without a valid record
end
expire(call('ZRANGEBYSCORE', KEPT, '-inf', step - get('keep_steps', 0), 'LIMIT', 0, AT_ONCE))
wake_workers()
return call('ZCOUNT', TAKEN, '-inf', step) + call('ZCOUNT', KEPT, '-inf', step - get('keep_steps', 0))
