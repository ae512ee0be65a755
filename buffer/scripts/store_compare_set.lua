-- milliseconds until the key expires, the value that it must have ('' for none), its new value
local value = call('GET', ENTRY) or ''
if value ~= ARGV[2] then
  return value ~= '' and value or ARGV[2] -- as torch's own stores answer
end
call('DEL', ENTRY) -- a full server lets what follows a deletion pass
call('SET', ENTRY, ARGV[3], 'PX', ARGV[1])
call('PUBLISH', ENTRY, '')
return ARGV[3]
