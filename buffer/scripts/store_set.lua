-- milliseconds until the key expires, the value
call('DEL', ENTRY) -- a full server accepts writes that follow a deletion
call('SET', ENTRY, ARGV[2], 'PX', ARGV[1])
call('PUBLISH', ENTRY, '')
