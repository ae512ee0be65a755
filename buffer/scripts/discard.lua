-- fence, kept groups...: delete their payloads
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
for index = 2, #ARGV do
  if call('ZREM', KEPT, ARGV[index]) == 1 then discard(ARGV[index]) end
end
wake_workers()
