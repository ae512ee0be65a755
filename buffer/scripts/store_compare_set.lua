-- milliseconds until the key expires, the value that it must have ('' for none), its new value
local value = redis.call('GET', KEYS[1]) or ''
if value ~= ARGV[2] then
  return value ~= '' and value or ARGV[2] -- as torch's own stores answer
end
redis.call('DEL', KEYS[1]) -- a full server lets what follows a deletion pass
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[1])
redis.call('PUBLISH', KEYS[1], '')
return ARGV[3]
