-- fence, tasks as "task attempt failures"...: append them to the tasks to roll again
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
for index = 2, #ARGV do call('RPUSH', REDO, ARGV[index]) end
