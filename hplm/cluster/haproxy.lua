-- The front door's filter reads the bodies of inference requests as they pass, and refuses those that can end or stall a Triton.
-- A request reaches Triton only when its last byte does, and that byte comes after these checks.
-- It holds no body in memory: a body may be far larger than HAProxy's buffers. At the end is how the router finds a tenant.

local LARGEST_BODY = 16 * 1024 * 1024 -- bytes; haproxy.cfg.j2 has the same for HTTP
local LONGEST_BODY = 60 -- seconds from a body's first byte to its last
local DEEPEST = 8 -- JSON arrays and objects within each other
local MOST_TOKENS = 32768 -- of JSON, or fields of a gRPC message: 1,024 pairs of texts need a third
local LARGEST_SHAPE = 65536 -- the product of its dimensions
local LONGEST_NAME = 128 -- bytes of a key
local LONGEST_VALUE = 1024 -- bytes of a JSON string that is no text, such as an id
local LONGEST_FIELD = 1024 -- bytes of a gRPC field that is looked at as a whole

-- docs/api.md, docs/generation.md, and the binary data of tritonclient. So no `classification` (class_count), no shared memory.
local KEYS = {}
for key in ([[
    id name shape datatype data parameters inputs outputs binary_data binary_data_output binary_data_size
    tenant authorization timeout truncate top_k hplm_priority hplm_rung hplm_tenants priority TEXT TEXT_PAIR
    text_input messages token_ids sampling_parameters stream exclude_input_in_output
    return_finish_reason return_num_input_tokens return_num_output_tokens return_logprobs
    max_tokens min_tokens temperature top_p min_p presence_penalty frequency_penalty repetition_penalty
    logit_bias seed stop stop_token_ids ignore_eos n logprobs echo
]]):gmatch("%S+") do
    KEYS[key] = true
end

local CONTROL = "\1" -- stands for any control character that was escaped
local HAS_CONTROL = "a control character in a string that is no text" -- Triton ends a tenant's name at a NUL

local TEXTS = {}
for key in ("data TEXT TEXT_PAIR text_input messages token_ids sampling_parameters stop"):gmatch("%S+") do
    TEXTS[key] = true
end

local function check_key(key)
    if not KEYS[key] then
        return "the key or parameter '" .. key:gsub("[^%w_]", "?") .. "' is not allowed here"
    end
end

-- JSON, in pieces. Where it is not JSON at all, Triton says so: its parser stops at the first wrong character.

local Json = {}
Json.__index = Json

function Json.new(size)
    return setmetatable({ left = size, open = {}, tokens = 0, scalar = "", backslash = "" }, Json)
end

-- Takes the next bytes of a body. Returns why the request is refused, or nil.
function Json:feed(piece)
    piece = piece:sub(1, self.left) -- binary data follows
    self.left = self.left - #piece
    -- Without escapes every quote ends a string. A key with an escape is not one of KEYS: they have no digits. Those of control
    -- characters become one, and an escape whose end has not arrived waits.
    piece = (self.backslash .. piece):gsub("\\\\", "")
    self.backslash = piece:match("\\u?%x?%x?%x?$") or ""
    self.backslash = self.backslash:find("^\\%x") and "" or self.backslash
    piece = piece:sub(1, #piece - #self.backslash):gsub("\\u00[01]%x", CONTROL):gsub("\\u007[fF]", CONTROL)
    piece = piece:gsub("\\[bfnrt]", CONTROL):gsub("\\.", "")
    local at = 1
    while at <= #piece do
        local problem
        if self.in_string then
            at, problem = self:in_quotes(piece, at)
        else
            at, problem = self:between_strings(piece, at)
        end
        if problem then
            return problem
        end
    end
end

function Json:in_quotes(piece, at)
    local stop = piece:find('"', at, true)
    local last = (stop or #piece + 1) - 1
    if self.key then
        self.key = self.key .. piece:sub(at, last)
        if #self.key > LONGEST_NAME then
            return nil, "a key has more than " .. LONGEST_NAME .. " bytes"
        end
    elseif not TEXTS[self.under] then
        self.length = self.length + last - at + 1
        if self.length > LONGEST_VALUE then
            return nil, "a string of more than " .. LONGEST_VALUE .. " bytes that is no text"
        elseif piece:sub(at, last):find("%c") then
            return nil, HAS_CONTROL
        end
    end
    if not stop then
        return #piece + 1
    end
    local key = self.key
    self.in_string, self.key, self.under = false, nil, key or self.under
    return stop + 1, key and check_key(key)
end

function Json:between_strings(piece, at)
    local first = piece:find("%S", at)
    if first ~= at then -- white space ends a number
        return first or #piece + 1, self:end_scalar()
    end
    local _, stop = piece:find("^[%w.+-]+", at)
    if stop then
        self.scalar = self.scalar .. piece:sub(at, stop)
        return stop + 1, #self.scalar > 32 and "a number has more than 32 characters" or nil
    end
    return at + 1, self:end_scalar() or self:mark(piece:sub(at, at))
end

function Json:mark(mark)
    self.tokens = self.tokens + 1
    if self.tokens > MOST_TOKENS then
        return "more than " .. MOST_TOKENS .. " JSON tokens: send fewer texts in one request"
    end
    local inner = self.open[#self.open]
    if mark == '"' then
        self.in_string, self.length = true, 0
        self.key = inner and inner.wants_key and "" or nil
    elseif mark == "{" or mark == "[" then
        self.open[#self.open + 1] = { is_array = mark == "[", wants_key = mark == "{", product = 1 }
        if #self.open > DEEPEST then
            return "JSON deeper than " .. DEEPEST .. " levels"
        end
    elseif mark == "}" or mark == "]" then
        self.open[#self.open] = nil
    elseif inner and not inner.is_array then
        inner.wants_key = mark == ","
    end
end

-- Numbers in arrays are shapes: texts are strings.
function Json:end_scalar()
    local scalar, inner = self.scalar, self.open[#self.open]
    self.scalar = ""
    if scalar == "" or not inner then
        return
    end
    if inner.is_array then
        inner.product = inner.product * math.max(1, scalar:match("^%d%d?%d?%d?%d?$") and tonumber(scalar) or LARGEST_SHAPE + 1)
        if inner.product > LARGEST_SHAPE then
            return "a shape of more than " .. LARGEST_SHAPE .. " elements, or another number in an array"
        end
    elseif not (scalar == "true" or scalar == "false" or scalar == "null" or scalar:match("^-?[%d.]+$") and #scalar <= 18) then
        return "the value " .. scalar:gsub("[^%w.+-]", "?") .. " is too large, or no JSON"
    end
end

-- gRPC: one message of the protobuf `ModelInferRequest`. It is read field by field, in pieces.

local Grpc = {}
Grpc.__index = Grpc

local function check_dimension(self, size)
    self.product = self.product * math.max(1, size)
    if self.product > LARGEST_SHAPE then
        return "a shape of more than " .. LARGEST_SHAPE .. " elements"
    end
end

-- Returns a number and the place behind it; nil if the bytes end before, or if it has more than 10 bytes.
local function varint(bytes, at)
    local value, scale = 0, 1.0
    for place = at, at + 9 do
        local byte = bytes:byte(place)
        if not byte then
            return nil, place <= #bytes
        end
        value, scale = value + (byte % 128) * scale, scale * 128
        if byte < 128 then
            return value, place + 1
        end
    end
    return nil, true
end

local function check_shape(self, packed)
    local at = 1
    while at <= #packed do
        local size, after = varint(packed, at)
        if not size then
            return "a shape that is not one"
        end
        local problem = check_dimension(self, size)
        if problem then
            return problem
        end
        at = after
    end
end

local function check_name(self, name)
    if not self.models[name] then
        return "the model is not served here"
    end
end

local function check_parameter(_, key)
    return check_key(key)
end

local function check_string(_, value)
    return value:find("%c") and HAS_CONTROL or nil
end

-- By field number: a function looks at the field, a table goes on within it. All others are passed over.
local PARAMETERS = { check_parameter, { [3] = check_string } }
local INPUT = { [3] = check_shape, [4] = PARAMETERS, starts = function(self)
    self.product = 1
end }
local OUTPUT = { [2] = PARAMETERS }
local REQUEST = { [1] = check_name, [4] = PARAMETERS, [5] = INPUT, [6] = OUTPUT }
local VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

function Grpc.new(models)
    return setmetatable({ models = models, rest = "", skip = 0, levels = {}, fields = 0, product = 1 }, Grpc)
end

function Grpc:feed(piece)
    local bytes, at = self.rest .. piece, 1
    self.rest = ""
    if not self.size then
        if #bytes < 5 then
            self.rest = bytes
            return
        end
        self.size = string.unpack(">I4", bytes, 2)
        if bytes:byte(1) ~= 0 then
            return "compressed messages are not read here"
        elseif self.size > LARGEST_BODY then
            return "a message of more than " .. LARGEST_BODY .. " bytes"
        end
        at, self.place = 6, 0 -- of `at` in the message
        self.levels = { { ends = self.size, fields = REQUEST } }
    end
    while at <= #bytes do
        local before, problem = at, nil
        at, problem = self:step(bytes, at)
        if problem then
            return problem
        elseif not at then
            self.rest = bytes:sub(before)
            return
        end
        self.place = self.place + at - before
    end
end

-- Takes one field, or a part of it. Returns the place behind; nil if more bytes are needed; nil and a reason to refuse.
function Grpc:step(bytes, at)
    if self.skip > 0 then
        local taken = math.min(self.skip, #bytes - at + 1)
        self.skip = self.skip - taken
        return at + taken
    end
    while #self.levels > 0 and self.place == self.levels[#self.levels].ends do
        self.levels[#self.levels] = nil
    end
    local level = self.levels[#self.levels]
    if not level then
        return nil, "more than one message"
    end
    self.fields = self.fields + 1
    if self.fields > MOST_TOKENS then
        return nil, "more than " .. MOST_TOKENS .. " fields"
    end
    local left = level.ends - self.place + at -- where the level ends
    local tag, after = varint(bytes, at)
    local size, start
    local wire = tag and tag % 8
    if wire == VARINT or wire == BYTES then
        size, start = varint(bytes, after)
        after = start
    elseif wire == FIXED64 or wire == FIXED32 then
        size, start = wire == FIXED64 and 8 or 4, after
    elseif wire then
        return nil, "a field that is not protobuf"
    end
    if not size then
        self.fields = self.fields - 1
        return nil, after and "a field that is not protobuf" or nil
    end
    local read = level.fields[tag // 8]
    if wire == VARINT then
        if start > left then
            return nil, "a field that is not protobuf"
        end
        return start, read == check_shape and check_dimension(self, size) or nil
    elseif start + size > left then
        return nil, "a field that is longer than its message"
    elseif wire ~= BYTES or not read then
        self.skip = size
        return start
    elseif type(read) == "table" then
        if read.starts then
            read.starts(self)
        end
        self.levels[#self.levels + 1] = { ends = self.place + start - at + size, fields = read }
        return start
    elseif size > LONGEST_FIELD then
        return nil, "a name, key, value or shape of more than " .. LONGEST_FIELD .. " bytes"
    elseif start + size - 1 > #bytes then
        self.fields = self.fields - 1
        return nil
    end
    return start + size, read(self, bytes:sub(start, start + size - 1))
end

-- The filter. haproxy.cfg sets `txn.door` to what the body is, and `txn.json_bytes` where binary data follow the JSON.

local Door = { id = "hplm-door", flags = filter.FLT_CFG_FL_HTX }
Door.__index = Door

function Door:new()
    return setmetatable({ models = self.models }, Door)
end

function Door:start_analyze(_, channel)
    if not channel:is_resp() then
        filter.register_data_filter(self, channel)
    end
end

function Door:http_headers(txn, message)
    if not message:is_resp() then
        self.kind = txn:get_var("txn.door")
        if self.kind == "json" then
            self.body = Json.new(tonumber(txn:get_var("txn.json_bytes")) or LARGEST_BODY)
        elseif self.kind == "grpc" then
            self.body = Grpc.new(self.models)
        elseif self.kind == "openai" then -- the gateway reads it with care; here only its time is limited
            self.body = { feed = function() end }
        end
    end
end

function Door:http_payload(txn, message)
    if message:is_resp() or not self.body then
        return
    end
    local piece = message:body()
    if not piece or piece == "" then
        return
    end
    local now = core.now().sec
    self.began = self.began or now
    local problem = self.body:feed(piece)
    if not problem and now - self.began > LONGEST_BODY then
        problem = "the request took more than " .. LONGEST_BODY .. " s to arrive"
    end
    if problem then
        self.body = nil
        self:refuse(txn, problem)
    end
end

function Door:refuse(txn, problem)
    txn:set_var("txn.refused", problem)
    problem = "[invalid_input] " .. problem
    local reply = txn:reply({ status = self.kind == "grpc" and 200 or 400 })
    if self.kind == "grpc" then
        reply:add_header("content-type", "application/grpc")
        reply:add_header("grpc-status", "3")
        reply:add_header("grpc-message", problem)
    else
        reply:add_header("content-type", "application/json")
        reply:set_body('{"error":"' .. problem .. '"}')
    end
    txn:done(reply)
end

-- Its arguments are the names of the models that may be asked.
core.register_filter("door", Door, function(door, models)
    door.models = {}
    for _, name in ipairs(models) do
        door.models[name] = true
    end
    return door
end)

-- The tenant in a gRPC message, for clients that send no metadata. HAProxy's own converter `ungrpc` cannot find the tenant: it takes the
-- first parameter of a request, whichever it is. Numbers of fields are those of the protobuf `ModelInferRequest`.

local MAP = 4 -- of parameters; an entry has a key and a value
local KEY, VALUE, STRING = 1, 2, 3

-- Iterates over the fields of bytes with a length: their numbers and contents. Stops where the bytes end or are no protobuf.
local function fields_of(bytes)
    local at = 1
    return function()
        while at <= #bytes do
            local tag, after = varint(bytes, at)
            if not tag then
                return
            end
            local wire, size, start = tag % 8, 0, after
            if wire == 0 or wire == 2 then
                size, start = varint(bytes, after)
                if not size then
                    return
                end
                size = wire == 2 and size or 0
            elseif wire == 1 or wire == 5 then
                size = wire == 1 and 8 or 4
            else
                return
            end
            at = start + size
            if at - 1 > #bytes then
                return
            end
            if wire == 2 then
                return tag // 8, bytes:sub(start, at - 1)
            end
        end
    end
end

local function field_of(bytes, wanted)
    for number, content in fields_of(bytes) do
        if number == wanted then
            return content
        end
    end
end

core.register_fetches("grpc_tenant", function(txn)
    local body = txn.f:req_body() or ""
    for number, entry in fields_of(body:sub(6)) do -- behind the length of the message
        if number == MAP and field_of(entry, KEY) == "tenant" then
            return field_of(field_of(entry, VALUE) or "", STRING)
        end
    end
end)
