-- fence, step
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
release(tonumber(ARGV[2]))
