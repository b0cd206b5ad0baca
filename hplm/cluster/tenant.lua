-- Finds the home of a request, and the tenant in a gRPC message.

-- Returns the id of one of a tenant's homes, at random: the first COUNT of COUNT/ID/ID... that take requests now. `nbsrv` says
-- that of a backend with one server, also while it drains.
core.register_fetches("home", function(txn)
    local pool, running, count = txn:get_var("txn.pool"), {}, nil
    for number in txn:get_var("txn.homes"):gmatch("%d+") do
        if not count then
            count = tonumber(number)
        elseif #running < count and txn.c:nbsrv(pool .. ":home:" .. number) > 0 then
            running[#running + 1] = number
        end
    end
    return running[1 + txn.f:rand(math.max(#running, 1))]
end)

-- For clients that send no metadata. HAProxy's own converter `ungrpc` cannot find the tenant: it takes the
-- first parameter of a request, whichever it is. Numbers of fields are those of the protobuf `ModelInferRequest`.

local PARAMETERS = 4 -- a map; an entry has a key and a value
local KEY, VALUE, STRING = 1, 2, 3

-- Returns a number and the place behind it, or nil if the bytes end before.
local function varint(bytes, at)
    local value, scale = 0, 1
    for place = at, math.min(at + 7, #bytes) do
        local byte = bytes:byte(place)
        value, scale = value + (byte % 128) * scale, scale * 128
        if byte < 128 then
            return value, place + 1
        end
    end
end

-- Iterates over the fields of bytes with a length: their numbers and contents. Stops where the bytes end or are no protobuf.
local function fields(bytes)
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

local function field(bytes, wanted)
    for number, content in fields(bytes) do
        if number == wanted then
            return content
        end
    end
end

core.register_fetches("grpc_tenant", function(txn)
    local body = txn.f:req_body() or ""
    for number, entry in fields(body:sub(6)) do -- behind the length of the message
        if number == PARAMETERS and field(entry, KEY) == "tenant" then
            return field(field(entry, VALUE) or "", STRING)
        end
    end
end)
