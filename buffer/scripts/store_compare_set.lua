-- milliseconds until the key expires, the expected value ('' for none), the new value
local value = call('GET', ENTRY) or ''
if value ~= ARGV[2] then
  return value ~= '' and value or ARGV[2] -- as torch's own stores reply
end
call('DEL', ENTRY) -- a full server accepts writes that follow a deletion
call('SET', ENTRY, ARGV[3], 'PX', ARGV[1])
call('PUBLISH', ENTRY, '')
return ARGV[3]
