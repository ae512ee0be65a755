-- fence, step
release(tonumber(ARGV[2]))
