-- -> descriptions of the members that have not expired
for _, id in ipairs(call('ZRANGEBYSCORE', MEMBERS, '-inf', now_ms())) do
  call('ZREM', MEMBERS, id)
  call('HDEL', MEMBER_FACTS, id)
end
local said = {}
for _, id in ipairs(call('ZRANGE', MEMBERS, 0, -1)) do said[#said + 1] = call('HGET', MEMBER_FACTS, id) end
return said
