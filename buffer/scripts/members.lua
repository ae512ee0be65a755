-- -> what everybody said whose listing has not ended
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('ZREM', KEYS[2], id)
  redis.call('HDEL', KEYS[3], id)
end
local said = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do said[#said + 1] = redis.call('HGET', KEYS[3], id) end
return said
