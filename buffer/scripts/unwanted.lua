-- names of payload files -> those that no ticket can refer to any more. A file is named TICKET-RANDOM and is referred to only by
-- a commit of its ticket (possible while that is reserved) or by that ticket's payload in the buffer or in quarantine.
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
