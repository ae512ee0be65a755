-- fence, mark of the checkpoint's position ("" for none) -> 1 if this server is older than the checkpoint, or empty
-- Recovery is this script, `settle` for chunks of tickets, then `recovered`. Until the last one no ticket is issued, so the
-- successor of a learner that dies in between can start over.
local marks = ' ' .. (call('HGET', STATE, 'marks') or '') .. ' '
local is_older = ARGV[2] ~= '' and not string.find(marks, ' ' .. ARGV[2] .. ' ', 1, true)
call('HSET', STATE, 'recovering', is_older and 2 or 1)
if is_older then call('DEL', REDO) end -- the checkpoint's list replaces it; until `recovered`, nothing is dropped
return is_older and 1 or 0
