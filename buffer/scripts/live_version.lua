-- -> the row of the live version
local STATE, VERSIONS = KEYS[4], KEYS[5]
local live = redis.call('HGET', STATE, 'live')
return live and redis.call('HGET', VERSIONS, live)
