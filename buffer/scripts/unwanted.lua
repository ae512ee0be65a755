-- names of payload files -> those that no ticket needs, now or ever: a file is named TICKET-RANDOM, and can be referred to only by
-- a commit of its ticket, so as long as that is reserved, or by what stands in the buffer or in quarantine for that ticket
local MAX_REFERENCE = 256
local function refers(hash, id, name)
  local size = call('HSTRLEN', hash, id)
  return size > 0 and size <= MAX_REFERENCE and string.sub(call('HGET', hash, id), -#name) == name
end

local unwanted = {}
for _, name in ipairs(ARGV) do
  local id = string.match(name, '^(t%d+)%-')
  local record = id and read(id)
  local may_come = record and record.state == 'reserved'
  if id and not may_come and not refers(PAYLOADS, id, name) and not refers(QUARANTINE_PAYLOADS, id, name) then
    unwanted[#unwanted + 1] = name
  end
end
return unwanted
