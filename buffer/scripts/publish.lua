-- fence, version, its row of the version table, number of rows to keep
local version = tonumber(ARGV[2])
call('HSET', VERSIONS, version, ARGV[3])
call('HDEL', VERSIONS, version - ARGV[4])
call('HSET', STATE, 'live', math.max(get('live', -1), version), 'highest', math.max(get('highest', -1), version))
wake_workers()
