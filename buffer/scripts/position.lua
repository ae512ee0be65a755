-- fence, step -> highest version, next ticket, next task, the redo list, the outstanding tickets
local lost = fence_lost(ARGV[1])
if lost then return lost end
local step, outstanding = tonumber(ARGV[2]), {}
for _, id in ipairs(redis.call('HKEYS', RECORDS)) do
  local taken_for = redis.call('ZSCORE', TAKEN, id)
  if not taken_for or tonumber(taken_for) > step then
    local record = read(id)
    outstanding[#outstanding + 1] = string.format('%d %d %d %d', ticket_number(id), record.task, record.attempt, record.failures)
  end
end
return { get('highest', -1), get('next_ticket', 0), get('next_task', 0), redis.call('LRANGE', REDO, 0, -1), outstanding }
