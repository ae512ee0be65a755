-- fence, kept groups...: delete their payloads
for index = 2, #ARGV do
  if call('ZREM', KEPT, ARGV[index]) == 1 then discard(ARGV[index]) end
end
wake_workers()
