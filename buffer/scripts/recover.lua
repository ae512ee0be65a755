-- fence, next ticket of the checkpoint -> 1 if this server is older than the checkpoint, or empty
-- Recovery has three parts, each bounded: this one, `settle` for some tickets at a time, `recovered`. Until the last one no
-- ticket is issued, so a learner that dies on the way leaves nothing that its successor cannot settle again.
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
call('HSET', STATE, 'recovering', 1)
local is_older = get('next_ticket', 0) < tonumber(ARGV[2])
if is_older then call('DEL', REDO) end -- the checkpoint knows better
return is_older and 1 or 0
