-- fence, tasks as "task attempt failures"...: append them to the tasks to roll again
for index = 2, #ARGV do call('RPUSH', REDO, ARGV[index]) end
