-- Appends the events of some keys, each key's in their order up to the first that fails; one answer
-- for each event.
-- KEYS: for each event its stream, and then its seen key, unless seen keys are off.
-- ARGV: how long a seen key lives in milliseconds (0: off), whether streams may be made (1),
--       and for each event how many texts its entry has, with a plus at a key's first event, and
--       the texts.
local seen_for, makes = ARGV[1], ARGV[2] == '1'
local answers, key, at, failed = {}, 1, 3, false
while at <= #ARGV do
  local first = at + 1
  local last = at + tonumber(ARGV[at])
  local stream, seen, answer = KEYS[key], nil, 'new'
  key = key + 1
  if seen_for ~= '0' then
    seen = KEYS[key]
    key = key + 1
  end
  if string.byte(ARGV[at]) == 43 then
    failed = false
  end
  if failed then
    answer, seen = 'held back', nil
  elseif seen then
    local set = redis.pcall('SET', seen, '', 'NX', 'PX', seen_for)
    if not set then
      answer = 'duplicate'
    elseif set.err then
      answer, seen = set.err, nil
    end
  end
  if answer == 'new' then
    local added
    if makes then
      added = redis.pcall('XADD', stream, '*', unpack(ARGV, first, last))
    else
      added = redis.pcall('XADD', stream, 'NOMKSTREAM', '*', unpack(ARGV, first, last))
    end
    if not added then
      answer = 'no stream'
    elseif type(added) == 'table' and added.err then
      answer = added.err
    end
    if answer ~= 'new' and seen then
      -- By the command that was permitted a moment ago, and a time long past. A seen key that
      -- stayed would make the next attempt a duplicate of an event that no stream has.
      local taken_back = redis.pcall('SET', seen, '', 'PXAT', '1')
      if taken_back.err then
        redis.call('DEL', seen)
      end
    end
  end
  answers[#answers + 1] = answer
  failed = answer ~= 'new' and answer ~= 'duplicate'
  at = last + 1
end
return answers
