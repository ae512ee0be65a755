-- milliseconds until the keys expire, what to add
local sum = call('GET', ENTRY_CALL)
if sum then -- the client did not hear our answer
  return sum
end
call('DEL', ENTRY_CALL) -- a full server lets what follows a deletion pass
sum = string.format('%d', call('INCRBY', ENTRY, ARGV[2]))
call('PEXPIRE', ENTRY, ARGV[1])
call('SET', ENTRY_CALL, sum, 'PX', ARGV[1])
call('PUBLISH', ENTRY, '')
return sum
