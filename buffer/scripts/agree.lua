-- facts as key and value in turn -> key and agreed value of each that differs
local FACTS, different = KEYS[1], {}
redis.call('HDEL', FACTS, '') -- a full server lets what follows a deletion pass
for index = 1, #ARGV, 2 do
  redis.call('HSETNX', FACTS, ARGV[index], ARGV[index + 1])
  local agreed = redis.call('HGET', FACTS, ARGV[index])
  if agreed ~= ARGV[index + 1] then
    different[#different + 1] = ARGV[index]
    different[#different + 1] = agreed
  end
end
return different
