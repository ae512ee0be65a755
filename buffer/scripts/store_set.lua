-- milliseconds until the key expires, its value
call('DEL', ENTRY) -- a full server lets what follows a deletion pass
call('SET', ENTRY, ARGV[2], 'PX', ARGV[1])
call('PUBLISH', ENTRY, '')
