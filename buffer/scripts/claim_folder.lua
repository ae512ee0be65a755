-- fence, token of the learner's folder of payload files ("" for none)
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
call('HSET', STATE, 'folder', ARGV[2])
