-- "" or "everything"
-- -> reserved, ready, taken, spent, quarantined, issued, slots, slots used, live version, fence, bytes, dropped by reason,
--    the oldest version of every ready group; with "everything" also the leased, reserved, ready, taken and recorded
--    tickets, and the payloads as ticket and size in turn
even_when_full()
collect_lost_leases()
local versions = {}
for index, value in ipairs(redis.call('ZRANGE', READY, 0, -1, 'WITHSCORES')) do
  if index % 2 == 0 then versions[#versions + 1] = tonumber(value) end
end
local reply = {
  redis.call('ZCARD', RESERVED), redis.call('ZCARD', READY), redis.call('ZCARD', TAKEN), get('spent', 0), get('quarantined', 0),
  get('issued', 0), (get('max_age', -1) + 1) * get('groups_per_step', 0), slots_used(), get('live', -1), get('fence', 0),
  get('bytes', 0), redis.call('HGETALL', DROPPED), versions,
}
if ARGV[1] == 'everything' then
  for _, set in ipairs({ LEASES, RESERVED, READY, TAKEN }) do reply[#reply + 1] = redis.call('ZRANGE', set, 0, -1) end
  reply[#reply + 1] = redis.call('HKEYS', RECORDS)
  local sizes = {}
  for _, id in ipairs(redis.call('HKEYS', PAYLOADS)) do
    sizes[#sizes + 1] = id
    sizes[#sizes + 1] = redis.call('HSTRLEN', PAYLOADS, id)
  end
  reply[#reply + 1] = sizes
end
return reply
