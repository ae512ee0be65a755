-- milliseconds until the keys expire, what to add
local COUNTER, CALL = KEYS[1], KEYS[2]
local sum = redis.call('GET', CALL)
if sum then -- the client did not hear our answer
  return sum
end
redis.call('DEL', CALL) -- a full server lets what follows a deletion pass
sum = string.format('%d', redis.call('INCRBY', COUNTER, ARGV[2]))
redis.call('PEXPIRE', COUNTER, ARGV[1])
redis.call('SET', CALL, sum, 'PX', ARGV[1])
redis.call('PUBLISH', COUNTER, '')
return sum
