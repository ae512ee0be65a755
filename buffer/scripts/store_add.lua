-- milliseconds until the keys expire, the number to add
local sum = call('GET', ENTRY_CALL)
if sum then -- a repeated call whose first reply was lost
  return sum
end
call('DEL', ENTRY_CALL) -- a full server accepts writes that follow a deletion
sum = string.format('%d', call('INCRBY', ENTRY, ARGV[2]))
call('PEXPIRE', ENTRY, ARGV[1])
call('SET', ENTRY_CALL, sum, 'PX', ARGV[1])
call('PUBLISH', ENTRY, '')
return sum
