-- fence, mark of the checkpoint's position ("" for none) -> 1 if this server has lost what came before it, or is empty
-- Recovery has three parts, each bounded: this one, `settle` for some tickets at a time, `recovered`. Until the last one no
-- ticket is issued, so a learner that dies on the way leaves nothing that its successor cannot settle again.
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
local marks = ' ' .. (call('HGET', STATE, 'marks') or '') .. ' '
local is_older = ARGV[2] ~= '' and not string.find(marks, ' ' .. ARGV[2] .. ' ', 1, true)
call('HSET', STATE, 'recovering', is_older and 2 or 1)
if is_older then call('DEL', REDO) end -- the checkpoint knows better; until `recovered`, nothing is dropped
return is_older and 1 or 0
