-- facts as key and value in turn -> key and agreed value of each that differs
local different = {}
call('HDEL', FACTS, '') -- a full server accepts writes that follow a deletion
for index = 1, #ARGV, 2 do
  call('HSETNX', FACTS, ARGV[index], ARGV[index + 1])
  local agreed = call('HGET', FACTS, ARGV[index])
  if agreed ~= ARGV[index + 1] then
    different[#different + 1] = ARGV[index]
    different[#different + 1] = agreed
  end
end
return different
