"""Writes the demo workload: prompts a household or small team could send to its assistant.

    python make_prompts.py --seed 0

makes three files beside this script (`--out-dir` puts them elsewhere), with rows of the form
`{"id": ..., "category": ..., "messages": [{"role": "user", "content": ...}]}`:

  prompts_train.jsonl     1200 rows in three categories: how_to, word_problem, note_summary
  prompts_heldout.jsonl     48 rows, the same three categories
  prompts_ood.jsonl         16 rows from outside that workload, written by hand (ood_*)

The categories take turns, so every prefix of a file holds them in equal share. All text here was
written for this recipe; nothing is copied from a data set. The same seed and the same script give
the same bytes: choices use only `random.random()`, whose sequence Python keeps between versions.
The word problems have whole-number answers at every step (checked as they are drawn; the answers
are not written out, since training uses the model's own replies).

What is held out (prompts_heldout.jsonl against prompts_train.jsonl):

  * Words. Every sixth entry of each word bank with six or more entries (people, companies, objects,
    dishes, faults, cities, whole how-to tasks, ...) is kept for the held-out file. Calendar words
    and the few banks named in SHARED_BANKS are not divided. A training row in which a held-out
    entry turns up by another way, as a whole phrase, is thrown away.
  * Templates. The how-to families in HELD_FAMILIES, the story shapes in HELD_STORIES and the note
    kinds in HELD_NOTES occur in no training row. In each category of the held-out file, rows
    0, 2, 4, ... use these, with the question frames, leads, endings and summary requests that
    STYLE_BANKS keeps for them; rows 1, 3, 5, ... use templates and frames that training has too,
    but held-out words. (Constraints such as "without a drill" and the words written into a
    template are not divided.)
  * Content. Held-out rows come first, from seeds of their own; a training row (and a held-out
    row) too close to an earlier one, by the share of word trigrams in common, is thrown away.
"""

import argparse
import json
import random
import re
from pathlib import Path

TRAIN_ROWS = 1200
HELDOUT_ROWS = 48
CATEGORIES = ("how_to", "word_problem", "note_summary")
# A row is refused when it shares more than this part of its word trigrams with an earlier row.
MAX_OVERLAP = {"how_to": 0.40, "word_problem": 0.36, "note_summary": 0.33}
# Fewest and most words in a prompt (for note_summary, in the note without the request).
WORDS = {"how_to": (5, 30), "word_problem": (20, 55), "note_summary": (40, 88)}

# ---------------------------------------------------------------------------------------------
# Word banks. Entries are parted by ";". Every sixth entry of a bank is held out.
# ---------------------------------------------------------------------------------------------

BANK_TEXT = {
    # Shared by all categories.
    "name": """Alex; Sam; Robin; Kim; Noor; Ari; Jules; Sasha; Remy; Charlie; Rowan; Toni; Mika;
        Lee; Kai; Ash; Eden; Jo; Quinn; Sky; Dana; Jamie; Morgan; Taylor; Casey; Riley; Avery;
        Jordan; Parker; Reese; Emery; Finley; Harper; Hayden; Jesse; Kerry; Leslie; Marley; Nico;
        Pat; Peyton; Shannon; Sidney; Stevie; Terry; Tracy; Val; Wren; Yuki; Zion; Ren; Sol; Tal;
        Amari; Bo; Chris; Devon; Elia; Frankie; Gale; Hollis; Indigo; Jaden; Kiran; Lane; Milan;
        Nikita; Oakley; Phoenix; Ray; Sage; Tatum; Cameron; Drew; Ellis; Florian; Hilal; Imani;
        Juno; Lou; Maris; Neri; Ola; Perry; Rene; Shay; Tove; Umi; Vesna; Wynn""",
    "day": "Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday",
    "month": """January; February; March; April; May; June; July; August; September; October;
        November; December""",
    "time": """8:15; 9:30; half past ten; noon; 2 pm; quarter to four; 4:40; 6 pm; 7:05; half past
        eight; 11:20; 1:45; quarter past three; 5:10; 10 am; 3:25""",
    "group": """the whole team; two flatmates; a family of five; three neighbours; the night shift;
        four roommates; a group of volunteers; six colleagues; two brothers; the front desk; the
        kitchen crew; a couple with a baby; ten club members; the new starters; the warehouse
        staff; grandparents; a visiting class; the choir; eight cousins; the reading group""",
    "place": """the hallway; the laundry room; the back garden; the shared kitchen; the garage; the
        attic; the community hall; the break room; the cellar; the spare bedroom; the boot room;
        the workshop; the bike shed; the front office; the stairwell; the greenhouse; the pantry;
        the meeting room; the nursery; the loading bay; the drying room; the utility cupboard; the
        reading room; the porch""",
    "event": """the spring fair; a birthday party; the staff lunch; a charity run; the summer
        picnic; a housewarming; the winter concert; a craft workshop; the open day; a quiz night;
        the parents' evening; a garden party; the farewell dinner; a chess tournament; the street
        festival; a film night; the harvest supper; a product launch; the sports day; a book swap;
        the art show; a pancake breakfast; the village market; a wedding; a first-aid course; the
        talent show""",
    "show": """the spring fair; the winter concert; the talent show; the art show; the puppet
        theatre; the dog show; the jazz evening; the comedy night; the steam rally; the school
        musical; the poetry slam; the circus""",
    "item": """pencils; tea lights; paper cups; marbles; envelopes; stickers; batteries; buttons;
        postcards; paper plates; light bulbs; seed packets; notebooks; bottle caps; beads; sponges;
        napkins; badges; balloons; clothes pegs; hooks; candles; folders; crayons; ribbons;
        coasters; screws; picture frames; key rings; teabags; magnets; stamps; lanterns; bookmarks;
        water bottles; glue sticks; wristbands; flower pots; playing cards; chalk sticks; jam jars;
        pins; flags; tennis balls; markers; spoons; posters; gift tags""",
    "food_unit": """muffins; cheese rolls; samosas; brownies; scones; spring rolls; flapjacks;
        pretzels; cupcakes; sandwiches; pies; dumplings; biscuits; cinnamon buns; tarts; pancakes;
        waffles; bagels; meringues; falafels""",
    "company": """Birchline; Norfield & Sons; Tamarind Ltd; Oakhurst; Bluebell Services; Kestrel;
        Larkfield; Pebble & Co; Marrow Brothers; Quayside; Summit Partners; Tealight; Willow &
        Finch; Redgate; Harbour Direct; Juniper Group; Copperfield; Ridgeway; Saffron Works;
        Thornbury; Vale & Daughters; Westmoor; Amberley; Delta Plus; Fernhill; Granite House""",
    "room": """room 4; the east wing; the studio; the reception area; the storeroom; the staff
        kitchen; the main hall; the basement; the archive; the training room; the small office; the
        lobby; the sports hall; unit 12; the canteen; the tower room; the music room; the annexe;
        the sewing room; the pool house; flat 3B; the print room; the conservatory; bay 7""",
    "street": """Mill Street; Elm Road; Station Lane; Harbour View; Orchard Close; Bridge Street;
        Park Avenue; Chapel Hill; Foundry Lane; Canal Walk; Market Square; Meadow Drive; Tannery
        Row; Ferry Road; Quarry Street; Rose Terrace; Windmill Lane; Ropewalk""",
    "city": """Lisbon; Ghent; Utrecht; Bergen; Porto; Krakow; Lyon; Turin; Aarhus; Cork; Seville;
        Graz; Leeds; Tallinn; Basel; Riga; Malmo; Bologna; Dresden; Antwerp; Vilnius; Bilbao;
        Zagreb; Bath; Ljubljana; Toulouse; Tampere; Split; Galway; Verona""",
    # How-to tasks.
    "stain": """red wine; coffee; ballpoint ink; grass marks; candle wax; beetroot juice; curry
        sauce; chewing gum; lipstick; tomato sauce; engine grease; mud; deodorant marks; blackberry
        jam; felt-tip pen; soy sauce; wood varnish; blood; chocolate; turmeric; sun cream; rust""",
    "fabric": """a cotton shirt; a wool rug; a linen tablecloth; denim jeans; a silk scarf; a
        canvas bag; a white duvet cover; a suede shoe; a child's school jumper; a velvet cushion; a
        football kit; a car seat; a beige carpet; a rain jacket; an apron; a mattress""",
    "dirty": """a glass oven door; bathroom grout; a greasy cooker hood; window blinds; a leather
        sofa; a clogged shower head; a chalkboard; a sticky keyboard; rusty baking trays; a cast
        iron pan; a birdcage; plastic garden chairs; a hairbrush; suede boots; a yoga mat;
        tea-stained mugs; a mouldy tent; the detergent drawer; a burnt saucepan; a smelly
        microwave; muddy trainers; an aquarium; a wooden chopping board; a wheelie bin; a dusty
        chandelier; a piano; a laptop screen; the inside of a vacuum flask; brass door handles; a
        barbecue grill""",
    "smell": """a musty smell; a fishy smell; a smoky smell; a damp smell; the smell of wet dog; a
        stale fried smell; the smell of fresh paint; a sour milk smell; a mothball smell; a mouldy
        smell""",
    "smelly_place": """the fridge; the car boot; an old wardrobe; a suitcase; a lunch box; the hall
        carpet; the bathroom; a sports bag; the caravan; a second-hand bookcase; the shoe cupboard;
        a wooden chest""",
    "plant": """basil; cherry tomatoes; strawberries; chives; lavender; radishes; sunflowers;
        chilli peppers; lettuce; sweet peas; a lemon tree; spring onions; mint; potatoes; runner
        beans; rosemary; garlic; pumpkins; an orchid; courgettes; coriander; blueberries; tulips;
        carrots; an aloe; snow peas; a fig tree; spinach; nasturtiums; mushrooms""",
    "pest": """slugs; aphids; ants; pigeons; moths; fruit flies; wasps; mice; snails; squirrels;
        silverfish; mosquitoes; cats; caterpillars""",
    "pest_target": """the lettuces; a rose bush; the sugar jar; the window sill; woollen jumpers;
        the fruit bowl; an outdoor table; the bird feeder; the flower bed; the bookshelf; the
        compost bin; the herb planter; the recycling corner; the cabbage patch""",
    "shrub": """a climbing rose; an apple tree; a lavender hedge; raspberry canes; a grapevine;
        hydrangeas; a bay tree; a wisteria; an overgrown privet hedge; a tomato plant; a rubber
        plant; a blackcurrant bush""",
    "food": """fresh parsley; a cut avocado; sourdough bread; soft cheese; ginger root; cooked
        rice; bananas; mushrooms from the market; brown sugar; olive oil; salad leaves; coffee
        beans; a whole pumpkin; half an onion; smoked salmon; homemade stock; fresh yeast; apples;
        dried chillies; egg whites; a birthday cake; carrots; roasted nuts; opened tinned tomatoes;
        sweet corn; leftover curry; raspberries; tortillas; honey; tofu""",
    "dish": """lentil soup; flatbread; a vegetable stir-fry; an omelette; tomato sauce; rice
        pudding; chickpea curry; potato salad; banana bread; a quiche; fried rice; apple crumble;
        noodle soup; roast vegetables; hummus; a cheese sauce; pizza dough; pancakes; bean chilli;
        fish cakes; granola; gnocchi; pickled cucumbers; a fruit salad; gravy; mashed potatoes;
        dumplings; a mushroom risotto; lemonade; shortbread""",
    "ingredient": """eggs; butter; milk; white flour; sugar; cream; baking powder; breadcrumbs;
        yogurt; honey; gelatine; corn starch; buttermilk; sour cream; peanuts; vanilla""",
    "bake": """a sponge cake; pancake batter; a pie crust; oat biscuits; a cheesecake; muffins; a
        white sauce; brownies; a bread loaf; custard; meatballs; waffles""",
    "leftover": """stale bread; cold pasta; half a cabbage; roast chicken; overripe bananas; boiled
        potatoes; a tub of ricotta; broccoli stalks; cooked beans; egg yolks; a bag of soft
        carrots; dry cake; wilted spinach; pickle juice; a lot of plums; unsold sandwiches; tinned
        chickpeas; porridge""",
    "appliance": """an electric kettle; a coffee machine; a steam iron; a dishwasher; a shower
        head; a washing machine; an espresso pot; a humidifier; an instant hot-water tap; a garment
        steamer""",
    "fault": """a dripping tap; a squeaky hinge; a sticking drawer; a wobbly table; a loose door
        handle; a torn fly screen; a chair with uneven legs; a cracked plant pot; a toilet that
        keeps running; a zip that splits open; a blind that will not roll up; a slow sink drain; a
        flickering desk lamp; a noisy fridge; a sagging shelf; a stuck window; a scratched wooden
        floor; a leaking hose; a wardrobe door that will not close; a loose bathroom tile; a
        draughty front door; a radiator that stays cold; a broken umbrella rib; a jammed paper
        shredder; a ripped pillow seam; a creaking stair; peeling wallpaper; a doorbell that does
        not ring; a wet patch under the sink; a bent bicycle basket; a frayed phone cable; a tumble
        dryer that takes too long""",
    "hangable": """a heavy mirror; a row of coat hooks; a whiteboard; three framed posters; a spice
        rack; a wall clock; a string of fairy lights; a towel rail; a bike; a cork notice board; a
        large tapestry; a magnetic knife strip; a floating shelf; a projector screen""",
    "wall": """a brick wall; a plasterboard wall; a tiled wall; a concrete wall; a wood-panelled
        wall; the back of a door; a sloping attic wall; an old lime plaster wall""",
    "flatpack": """a flat-pack wardrobe; a bunk bed; a standing desk; a garden bench; a bookcase
        with doors; a baby cot; a shoe cabinet; a pop-up gazebo; a trampoline; an office chair; a
        raised planting bed; a chest of drawers""",
    "blade": """a kitchen knife; garden shears; fabric scissors; a wood chisel; a lawn mower blade;
        a vegetable peeler; a pocket knife; hedge clippers; a hand saw; a pizza wheel; a bread
        knife; an axe""",
    "bike_job": """change an inner tube; adjust squealing brakes; oil a dry chain; raise a stuck
        saddle; fit mudguards; straighten a wheel; clean a muddy derailleur; replace worn brake
        pads; mount a child seat; true a wobbly rim; wrap handlebar tape; fit a rear light; lock a
        bike well at a station; pack a bike for a train ride""",
    "car_job": """check the tyre pressure; top up the coolant; jump-start a flat battery; replace a
        wiper blade; remove tar spots; clear a foggy windscreen; change a spare wheel; read the oil
        dipstick; fit a roof box; defrost a frozen lock; clean cloudy headlights; find a slow
        puncture; tie down a long ladder; keep crumbs off the back seat""",
    "device": """a shared printer; a guest Wi-Fi network; a second monitor; a shared calendar; a
        password manager; an out-of-office reply; a video call with two cameras; a smart
        thermostat; a network drive; parental controls; a label printer; a baby monitor; a team
        mailing list; a barcode scanner; a ticket inbox; two-step login; a digital photo frame; a
        time-lapse camera; an online booking form; a till tablet; a burglar alarm; an e-reader; a
        shared to-do board; a backup router""",
    "sheet_goal": """adds up monthly bills; tracks who owes what; shows overdue orders in red;
        counts days of leave; ranks quiz scores; lists birthdays by month; compares energy use by
        year; works out a weekly rota; logs petrol costs; turns weights into prices; warns when
        stock runs low; plots the baby's feeding times; averages survey answers; splits rent by
        room size; sums hours per project; finds duplicate addresses; draws a seating chart; tracks
        plant watering""",
    "data": """family photos; a work laptop; phone contacts; old emails; a recipe collection;
        scanned contracts; the club's member list; a music library; chat history; a website; tax
        papers; voice memos; school projects; a stack of home videos""",
    "doc": """a polite reminder to a late payer; a short job advert; a thank-you card to a
        supplier; a sick note email; a notice about bin days; a complaint to an airline; an
        invitation to a barbecue; a handover document; a product description; a reference for an
        intern; house rules for guests; a refund request; a toast for a retirement; meeting
        minutes; a press note for a bake sale; a letter to a landlord; an apology for a late
        delivery; a one-page project plan; a packing list; a lost cat poster; an agenda for a
        workshop; a tenant newsletter; a safety checklist; a warm welcome message; a cover letter;
        a customer survey""",
    "clutter": """a junk drawer; a shared tool cupboard; a tiny wardrobe; receipts in shoe boxes; a
        chaotic inbox; a spice shelf; kids' drawings; a stockroom; charging cables; a bookshelf;
        craft supplies; a chest freezer; the key cabinet; tins and jars; a photo collection; desk
        paperwork; spare screws and nails; sewing patterns; the lost-property box; a medicine
        cabinet; winter coats; board games; a messy desktop folder; sports gear""",
    "meeting": """a weekly stand-up; a project kick-off; a budget review; a tenants' meeting; a
        quick feedback round; a brainstorming session; a job interview; a hand-over between shifts;
        a quiet online workshop; a family meeting; an annual general meeting; a lessons-learned
        talk; a training morning; a first call with a client; a safety briefing; a planning poker
        session""",
    "chore": """the washing-up; the electricity bill; on-call duty; cleaning the stairs; the cost
        of a holiday house; cooking; airport pick-ups; the bin rota; dog walks; minute-taking;
        weekend shifts; lawn mowing; the grocery bill; parking spaces""",
    "topic": """compound interest; a fuse box; how vaccines work; the offside rule; recycling
        symbols; a heat pump; time zones; a mortgage; how yeast works; the tides; leap years; a
        firewall; percentages; why leaves change colour; daylight saving time; a pension; the water
        cycle; inflation; how a lock works; a food chain""",
    "audience": """a six-year-old; a new colleague; my grandmother; a class of teenagers; someone
        with no technical background; a visitor from abroad; a bored nephew; the whole team; a
        customer on the phone; an apprentice""",
    "trackable": """houseplant watering; library books; warranty papers; spare keys; overtime
        hours; petty cash; a baby's naps; loaned tools; medicine times; vet visits; meter readings;
        guests' allergies; passport dates; subscription renewals; freezer contents; volunteer
        shifts; bike services; parcel returns; reading progress; fire drills; borrowed chairs;
        parking permits""",
    "packable": """wine glasses; a desktop computer; a wedding dress; houseplants; framed pictures;
        a record collection; a camera; kitchen knives; a guitar; baby clothes; fishing rods; a
        layer cake; climbing gear; tablecloths; board games; winter boots; a sewing machine; a
        terrarium""",
    "trip": """a house move; a long train journey; a flight; a camping weekend; a trade fair; a
        month in storage; a ferry crossing; a hiking tour; a bike trip; a courier; a ski holiday; a
        move abroad""",
    "heavy": """a sofa; an upright piano; a fridge; a wardrobe; a washing machine; an aquarium; a
        stone birdbath; a filing cabinet; a treadmill; a king-size mattress; a marble table; a full
        bookcase""",
    "pet": """a puppy; an older cat; a parrot; a rescue dog; a rabbit; a kitten; a budgie; a guinea
        pig; a nervous greyhound; a pony""",
    "trick": """stay off the sofa; come when called; walk calmly past joggers; use a new bed; sit
        quietly at the vet; step into a carrier; ignore the doorbell; take medicine; drink more
        water; sleep through the night; share a room with a baby; stop chewing cables""",
    "saving": """water when washing dishes; gas when cooking pasta; paper when printing reports;
        petrol on the way to work; electricity when doing laundry; water in the garden; heat in a
        draughty house; time when packing orders; money on school books; detergent; printer ink;
        coins for a rainy day; plastic in the kitchen; power when charging devices; gas when
        baking; fabric when sewing; energy when lighting a shop window; stamps; time on meetings;
        water in the shower; packaging for hosted events; firewood; space in a moving van; data on
        a phone""",
    "weather": """heavy snow; a heatwave; a week of rain; strong winds; the first frost; a
        hailstorm; a power cut; a flood warning; pollen season; a dry spell""",
    "weather_place": """a balcony garden; a garden shed; a holiday cottage; a small shop; a chicken
        coop; a caravan; outdoor pipes; a beehive; a greenhouse; a cellar; a flat roof; a beer
        garden; a rowing boat; a playground""",
    "craft": """a bird feeder; a pencil holder; a draught stopper; a picture frame; a doll's house;
        a notebook cover; a plant hanger; party bunting; a phone stand; a doormat; a board game; a
        lampshade; a puppet; a laundry bag; a wreath; a toy boat; a jewellery box; a cat
        scratcher""",
    "scrap": """milk cartons; old T-shirts; wine corks; cardboard tubes; a broken ladder; jam jars;
        worn jeans; pallet wood; egg boxes; bicycle tubes; odd socks; newspaper; bottle lids; a
        curtain; tin cans; leftover tiles""",
    "skill": """touch typing; sign language basics; sourdough baking; juggling; chess openings;
        first aid; whistling; knitting; public speaking; map reading; sketching faces; swimming;
        the ukulele; soldering; speed reading; calligraphy; cooking rice well; tying flies; spoken
        Spanish; mental arithmetic""",
    "span": """in a month; in two weeks; in ten minutes a day; over a weekend; on rainy afternoons;
        during the summer holidays; with half an hour a week; in three evenings""",
    "choice": """a mattress; a paint colour for a dark room; a first bike for a child; a phone
        plan; a reliable plumber; a good melon; a gift for a colleague; running shoes; a desk
        chair; a font for a flyer; a name for a small shop; a houseplant for a dark corner; a
        travel insurance; an accountant; a carpet for stairs; a second-hand laptop; a wine for a
        spicy meal; a nursery; a tent for four; a venue for a party; a cordless vacuum; curtains
        for a bay window; a recipe for a crowd; a hammer; a dentist; a frame for a watercolour""",
    "measurable": """a room for a carpet; a ring finger; curtains; the height of a tree; flour
        without scales; a bike frame; the slope of a drain; humidity; a dog for a coat; internet
        speed; sleeve length; the volume of a pond; noise from next door; a window for blinds""",
    "knot": """a bow tie; a bowline; parcel string; a headscarf; a hammock to two trees; shoelaces
        that stay tied; a ponytail holder; a canoe to a roof rack; balloon ends; a gift ribbon;
        tomato plants to a cane; a napkin swan""",
    "person_task": """opening the shop; using the till; watering the greenhouse; closing the
        kitchen; answering the phone; sorting the post; taking bookings; feeding the horses;
        locking up at night; packing parcels; cleaning the coffee machine; checking in guests;
        logging repairs; filling the bread oven""",
    "trainee": """a new volunteer; a temp; a teenager; a weekend helper; an exchange student; my
        replacement; a neighbour; a trainee; an intern; a seasonal worker; a relief caretaker; my
        brother""",
    "job_home": """bleed a radiator; reset a tripped fuse; unblock a sink; paint a ceiling; remove
        a stripped screw; seal a bathtub; defrost a freezer; find a wall stud; read a water meter;
        replace a light switch safely; level a washing machine; insulate a loft hatch; strip old
        paint; change a vacuum bag; light a wood stove; hang wallpaper in a corner; regrout a
        shower; fill nail holes; silence a beeping smoke alarm; fold a fitted sheet; iron a pleated
        skirt; sew on a button; wash a down jacket; fluff a flat pillow; darn a sock; shorten
        trousers; dry boots overnight; whiten old lace; remove a price sticker; open a stuck
        jar""",
    "job_people": """turn down an invitation kindly; ask for a pay rise; calm a crying toddler;
        remember people's names; start a book club; give honest feedback; handle a rude customer;
        ask a neighbour to be quieter; find a babysitter; keep a video call short; plan a surprise
        party; end a phone call politely; greet a delegation; cheer up a tired team; say no to
        extra work; settle a dispute about parking; introduce two teams; mediate between siblings;
        thank volunteers; host a shy guest; carry bad news to a client; share a desk; leave a group
        chat; break in a new manager""",
    "job_money": """plan a weekly food budget; read a payslip; cancel a gym contract; dispute a
        wrong bill; save for a holiday; compare loan offers; file receipts; claim travel expenses;
        set a price for handmade soap; open a joint account; cut the phone bill; write an invoice;
        sell an old camera online; count a cash drawer; donate furniture; return a faulty toaster;
        estimate a moving cost; plan for a big repair; split a deposit; budget for a school
        trip""",
    "job_food": """peel a mango; poach an egg; cook rice without burning it; knead bread dough;
        freeze soup in portions; whip cream by hand; tell if an egg is fresh; ripen a hard avocado;
        toast nuts; cut an onion without tears; season a wok; thaw a turkey; blanch almonds; carve
        a chicken; brew iced tea; make a packed lunch kids will eat; roll sushi; fillet a trout;
        rescue an oversalted stew; keep guacamole green; steam vegetables; set jam; melt chocolate;
        sprout beans; shuck corn; reheat a pizza; boil a dozen eggs at once; soften hard butter;
        cook for one; bake in a toaster oven""",
    "job_life": """fall asleep faster; wake up without an alarm; pack light for four days; read
        more books; stretch after a long drive; find a lost earring; stop a nosebleed; plan a walk
        with a pram; beat jet lag; remember a shopping list; keep glasses from fogging; break in
        stiff shoes; treat a small burn; take a good group photo; warm up cold hands; stop hiccups;
        remove a splinter; keep a diary; cut screen time; learn a poem by heart; plan a picnic;
        choose a walking route; get ready for a blood test; pitch a tent; light a campfire; read a
        bus map""",
    # How-to frames: {task} is "descale a kettle", {doing} is "descaling a kettle".
    "frame": """How do I {task}?; What is the best way to {task}?; Can you tell me how to {task}?;
        I need to {task}. Where do I start?; Quick question: how can I {task}?; What's a sensible
        order of steps if I want to {task}?; Give me simple steps to {task}.; Explain briefly how
        to {task}.; How would you {task}?; Is there an easy way to {task}?; Tips for {doing},
        please.; What should I avoid when {doing}?; Please describe how to {task}.; How does one
        {task}?; We want to {task}. What do we need?; I've never tried {doing}. How does it work?;
        Show me how to {task}.; What is the usual mistake people make when {doing}?; Could you walk
        me through {doing}?; Help me {task}.; Any advice on {doing}?; How long does it take to
        {task}, and how is it done?; {name} asked me how to {task}. What should I say?; What's the
        safest way to {task}?; Write a short guide to {doing}.; What should I have at hand to
        {task}?; How can a beginner {task}?; Is it hard to {task}? Tell me the main steps.; I'm
        about to {task}. What comes first?; List the steps for {doing}.; What is a good way to
        {task}?; My colleague wants to {task}. What is your advice?; Do you know a good method for
        {doing}?; Best way to {task}?; I keep failing at {doing}. What am I doing wrong?; Make me a
        checklist for {doing}.""",
    "lead": """I have never done this before.; It's for {event}.; I only have a free hour on
        {day}.; Guests come on {day}.; {name} is away this week.; Money is tight this month.; I
        tried once and it went wrong.; We are only two people.; I am left-handed.; It has to be
        done by {time}.; {name} and I disagree about this.; It's my first week here.; I am writing
        a note for {group}.; We are new to this town.; I promised {name} to find this out.; Nobody
        at work could help me.; This may be a silly question.; I read three different answers
        online.; My day off is {day}.; {name} always did this for us.; I need this for {group}.; We
        start on {day}.; I am in a bit of a hurry.; My grandmother knew how, but I don't.""",
    "home_lead": """We rent, so nothing permanent please.; My flatmate usually does this.; Our
        office has no caretaker.; The manual is lost.; We share one small kitchen.; I have a bad
        back.; The shop is closed today.; Our landlord does not mind.; We live on the fifth floor.;
        There is a baby asleep next door.; I want to do it on {day}.; We move out in {month}.; The
        last tenant left it like this.; {name} wants to help me with it.; The house was built in
        1930.; I found a toolbox in {place}.; We have no lift.; My hands are not very steady.""",
    "ending": """Keep it short.; Please use a numbered list.; Five steps at most.; Answer in plain
        words.; Two or three sentences are enough.; Mention what to buy.; What can go wrong?; One
        paragraph, please.; Add one safety tip.; No jargon, please.; Start with what I need.; Give
        me the short version.; Put the most important thing first.; Tell me roughly how long it
        takes.""",
    # Summary requests: {note} is the note.
    "ask": """Summarise this note in two sentences: // {note}; {note} // Summarise the note above
        in two sentences.; Please give me a two-sentence summary of this message: // {note}; In two
        sentences, what does this note say? // {note}; Read the note below and sum it up in one or
        two sentences. // {note}; What are the main points here? // {note}; {note} // Boil this
        down to two short sentences.; Shorten this to the essentials: // {note}; TL;DR in two
        sentences, please: // {note}; {note} // What is the key message? Two sentences at most.; I
        missed this. Can you sum it up briefly? // {note}; Give me the gist in a single sentence:
        // {note}; Condense the following note for {group}, in two sentences: // {note}; {note} //
        Please write a short summary for {name}.; Summarize the text below in at most 30 words. //
        {note}; Who has to do what, according to this note? Answer in two sentences. // {note};
        {note} // In brief: what happened and what comes next?; Turn this into a two-line summary:
        // {note}; Note to summarise: "{note}" Use two sentences.; Could you shorten this for the
        notice board? Two sentences. // {note}; {note} // Sum up, keeping the dates and numbers.;
        Make a brief summary of the note from {name}: // {note}; Summarise in two plain sentences,
        without details: {note}; {note} // Can I have that in two sentences?; I need the short
        version of this: // {note}; Write one sentence that captures this note: // {note}; Please
        summarise what was written here: // {note}; {note} // Give a summary in two sentences for
        someone in a hurry.; Rewrite as a summary of no more than two sentences. // {note}; Pick
        out the most important facts in this note and put them in two sentences. // {note}""",
    # Notes.
    "team": """the sales team; facilities; the kitchen; accounts; the board; customer care; the
        night crew; the workshop team; marketing; the front desk team; logistics; the volunteers;
        the design group; the youth group; human resources; the allotment committee; the web team;
        the cleaning crew""",
    "goods": """folding chairs; toner cartridges; coffee beans; desk lamps; fleece blankets;
        cardboard boxes; paint rollers; flour sacks; shower curtains; safety gloves; wine glasses;
        oat milk cartons; ceiling tiles; garden hoses; hand towels; name badges; extension leads;
        freezer bags; door locks; first-aid kits; ring binders; apple juice crates; floor mats;
        bike helmets; whiteboard pens; soup bowls; dust masks; bamboo canes; tea towels; wall
        brackets; compost bags; serving trays""",
    "machine": """the boiler; the goods lift; the coffee machine; the dishwasher; the main gate;
        the ventilation unit; the card reader; the forklift; the projector; the ice maker; the
        alarm panel; the floor polisher; the water pump; the oven in the canteen; the roller
        shutter; the paper cutter; the hand dryer; the walk-in fridge; the pottery kiln; the
        treadmill; the ticket printer; the heat pump""",
    "symptom": """makes a grinding noise; stops after ten minutes; shows error code {11-79}; smells
        of burning; will not start on the first try; runs hot; trips the fuse; shakes badly; gets
        louder every day; beeps without reason; reacts very slowly; switches itself off at night;
        shows a red light; jams twice a day; works only after a reset; hums all the time; needs a
        kick to start; loses its settings""",
    "part": """filter; drive belt; door seal; fuse; pressure valve; fan blade; hinge; sensor;
        gasket; bearing; power cable; thermostat; spring; switch; drain hose; control board; lamp;
        battery pack""",
    "decision": """move the deadline to {day}; hire one more part-time helper; drop the printed
        leaflet; keep the old price list until {month}; ask {company} for a new quote; test the new
        rota for a month; paint {room} over the holidays; open an hour later on {day}s; cancel the
        second workshop; use one shared calendar; buy a used van; lower the ticket price; send the
        survey again; postpone the move to {room}; change the cleaning contract; order samples
        first; split the project in two parts; meet every second week; limit each stand to two
        tables; try a cheaper supplier; ban food in {room}; write a short guide for new staff;
        extend the trial by {2-6} weeks; raise the deposit to {20-90/10} euros""",
    "problem": """the budget is {200-900/50} euros over plan; two volunteers dropped out; the
        samples arrived late; nobody has the spare key; the sign-up form does not work on phones;
        parking is still unsolved; the supplier has not answered; the hall is double-booked;
        customers find the labels confusing; the stock list is out of date; the noise complaints
        continue; we have no first-aider on {day}; half of the invoices lack a number; the heating
        bill doubled; the new chairs are too low; the permit is missing; the flyers have a wrong
        date; the waiting list keeps growing""",
    "todo": """call {company}; update the price list; book {room}; collect the keys; check the
        smoke alarms; send the minutes; compare three quotes; order more {goods}; write to the
        members; print the badges; clear out {place}; draft the schedule; test the microphones;
        return the borrowed tent; take photos of the damage; find a new date; ask {name} about the
        contract; count the cash box; train the new helpers; fix the link on the website; prepare a
        shopping list; arrange a taxi; translate the sign; water the plants""",
    "reason": """a burst pipe; a family matter; a train strike; illness; a power cut; roadworks on
        {street}; a booking mistake; low numbers; heavy rain; a late delivery; a broken lift; a
        school holiday; a lost key; a staff shortage; bad weather; a software update; a fire drill;
        a clash with {event}""",
    "pet_named": """Biscuit the cat; Olive the spaniel; Pickle the parrot; Mango the rabbit; Tofu
        the tabby; Bramble the terrier; Waffle the guinea pig; Juniper the collie; Pepper the
        kitten; Noodle the dachshund; Clover the hamster; Domino the old tomcat; Hazel the
        retriever; Fig the tortoise; Scout the beagle; Marble the cockatiel; Poppy the sheepdog;
        Otto the goose; Sesame the foal; Rusty the setter""",
    "system": """the booking site; the shared drive; the payroll system; the phone line; the door
        access system; the online shop; the email server; the till software; the time clock; the
        backup server; the guest Wi-Fi; the library catalogue; the ticket queue; the newsletter
        tool; the camera system; the stock database""",
    "it_cause": """an expired certificate; a full disk; a faulty switch; a wrong setting; an
        unplanned update; a cut cable; too many logins at once; a forgotten password change; a
        broken power supply; a bad import file; a typing error in the address; an overheated
        server; a lost connection to the provider; a duplicate user account""",
    "vehicle": """the blue van; the early train; a rental car; the night bus; the airport shuttle;
        {name}'s estate car; the ferry; a minibus; the tram; the cargo bike; the 7:40 coach; a
        taxi; the club's trailer; the slow train""",
    "sight": """the harbour museum; the old market hall; the botanical garden; a pottery studio;
        the castle hill; the textile factory; a boat tour; the science centre; the cathedral tower;
        a cheese dairy; the modern art gallery; a street food court; the city archive; the river
        path; the tram museum; the observatory""",
    "skill_course": """the new till; safe lifting; first aid; the stock scanner; fire
        extinguishers; the booking form; food hygiene; data protection; the coffee grinder;
        conflict talks; the pallet truck; spreadsheet basics; telephone manner; chainsaw safety;
        the label printer; allergen rules""",
    "menu_item": """the beetroot burger; the pea soup; the almond cake; the breakfast bowl; the
        mushroom toast; the fish pie; the lentil salad; the cold brew; the pumpkin ravioli; the
        cheese board; the rhubarb tart; the noodle box; the chilli wrap; the oat cookie; the kale
        pesto; the carrot dip""",
    "taste": """too salty; a bit dry; slow to prepare; popular with families; too sweet; better the
        next day; hard to carry; short of flavour; larger than needed; perfect with lemon; burnt at
        the edge; too expensive to make; pleasantly crisp; watery; very filling; pale in colour""",
    "found": """a grey scarf; a child's rucksack; a silver bracelet; two umbrellas; a phone in a
        green case; a bunch of keys; reading glasses; a flute case; a metal lunch tin; a walking
        stick; a red glove; a swimming bag; a library card; a teddy bear; a black wallet; a pair of
        earrings; a folded map; a knitted hat; a camera strap; one football boot; a thermos flask;
        a blue cardigan; a hearing aid; a wedding ring""",
    "book": """a novel about a lighthouse; a history of tea; a detective story; a memoir of a
        nurse; a collection of short stories; a book on bees; a family saga; a travel diary; a
        science fiction tale; a graphic novel; a biography of a pilot; letters from a prison; a
        ghost story; a play about bakers; a thriller set on a train; a novel in verse; a book about
        maps; a story of two sisters""",
    "aside": """The blue ladder is back in {place}.; {name} found a cheaper way to post letters.;
        Somebody parked on the lawn again.; The kettle trips the fuse when the toaster is on.; A
        photographer comes by around {time}.; Do not use the side door, it sticks.; {name} has a
        new phone number.; The good scissors have disappeared.; We had a visit from the fire
        inspector, all fine.; The clock in {room} is {4-12} minutes slow.; There is cake from
        {name}'s birthday in the fridge.; The neighbour's cat got in twice.; Snow is forecast for
        {day}.; Our old sign still hangs on {street}.; {name} is looking for a flat near {street}.;
        The recycling was not collected.; Someone borrowed the trolley without asking.; The coffee
        fund is empty.; {company} sent a calendar as a present.; Strong tea helped.; The lights in
        {place} stay on all night.; {name} lost a bet and brings biscuits.; It was the hottest day
        since {month}.; A school class asked for a tour.; The door code changes on {3-28} {month}.;
        The window in {room} was open all weekend.; We used the last of the stamps.; {name} and
        {name} are now engaged.; One chair in {room} has a loose leg.; The radio said there would
        be traffic jams.; {name} sends greetings from {city}.; The first-aid box was moved to
        {place}.; The new mop is excellent.; A bee nest hangs under the roof.; The spare bulbs are
        in a tin behind the paint.; We are collecting old glasses for a charity.; The rubbish bags
        from {company} tear too easily.; {name} will be fifty in {month}.; Nobody claimed the prize
        of the raffle.; The bus on {street} runs every {12-40} minutes.; The piano was tuned for
        {60-140/10} euros.; The dog next door barks at the postman.; The password is not written
        down here on purpose.; A local paper wants to interview {name}.; The wall in {place} has
        fresh paint, do not touch it.; We saw a fox near the bins.; The tap in {room} runs brown
        for a minute.; Please speak quietly on the stairs.; {name} fixed the wobbly table with a
        folded card.; The thermometer in {place} showed {3-9} degrees.; The fish tank was cleaned
        by {name}.; A bag of sand is ready in case of ice.; The guest book is full.; {name} has
        started a course in {city}.; Last year it was the same.; The label maker needs new tape.;
        It took three of us to carry it.; The smell of paint is almost gone.; {name} took the wrong
        coat home.; An old friend from {city} dropped in.""",
    "crop": """the tomatoes; the beans; the onions; the apple trees; the strawberries; the leeks;
        the pumpkins; the potatoes; the roses; the lettuces; the beetroots; the raspberries; the
        peas; the cucumbers; the sunflowers; the dahlias; the cabbages; the plum trees""",
}

SHARED_BANKS = {"day", "month", "time", "span"}  # not divided into train and held-out
# In these, held-out entries go with held-out templates only.
STYLE_BANKS = {"frame", "ask", "lead", "home_lead", "ending"}

# ---------------------------------------------------------------------------------------------
# how_to: families of tasks by domain, and constraints that fit a domain.
# ---------------------------------------------------------------------------------------------

FAMILIES = {  # name: (domain, task)
    "stain": ("clean", "get {stain} out of {fabric}"),
    "clean": ("clean", "clean {dirty}"),
    "smell": ("clean", "get rid of {smell} in {smelly_place}"),
    "descale": ("clean", "descale {appliance}"),
    "grow": ("garden", "grow {plant}[| from seed| in a pot| on a windowsill| in heavy soil]"),
    "pest": ("garden", "keep {pest} away from {pest_target}"),
    "prune": ("garden", "prune {shrub}[| in spring| in autumn| without harming it]"),
    "store": (
        "store",
        "store {food}[| for a week| so it stays fresh| over the winter| for a day trip]",
    ),
    "cook": ("cook", "make {dish}[| for {group}| from scratch| in one pot| the night before]"),
    "replace": ("swap", "replace {ingredient} in {bake}"),
    "use_up": (
        "cook",
        "use up {leftover}[| in a quick dinner| for lunch| before a trip| for breakfast]",
    ),
    "job_food": ("kitchen", "{job_food}"),
    "fix": ("repair", "fix {fault}"),
    "hang": ("repair", "hang {hangable} on {wall}"),
    "assemble": ("repair", "put together {flatpack}"),
    "sharpen": ("repair", "sharpen {blade}"),
    "job_home": ("repair", "{job_home}"),
    "bike": ("road", "{bike_job}"),
    "car": ("road", "{car_job}"),
    "device": ("office", "set up {device}[| for {group}|]"),
    "sheet": ("office", "make a spreadsheet that {sheet_goal}"),
    "backup": ("office", "back up {data}"),
    "write": ("text", "write {doc}"),
    "organise": ("order", "[organise|tidy up|sort out] {clutter}"),
    "track": ("order", "keep track of {trackable}"),
    "meeting": ("people", "run {meeting}"),
    "split": ("people", "split {chore} fairly between {group}"),
    "explain": ("explain", "explain {topic} to {audience}"),
    "train_up": ("people", "train {trainee} in {person_task}"),
    "event": ("people", "plan {event} for {group}"),
    "job_people": ("people", "{job_people}"),
    "money": ("money", "{job_money}"),
    "pack": ("travel", "pack {packable} for {trip}"),
    "move": (
        "travel",
        "move {heavy}[| up two flights of stairs| across town| through a narrow door]",
    ),
    "life": ("life", "{job_life}"),
    "learn": ("life", "learn {skill} {span}"),
    "pet": ("life", "teach {pet} to {trick}"),
    "save": ("thrift", "save {saving}"),
    "weather": ("prepare", "prepare {weather_place} for {weather}"),
    "craft": ("order", "make {craft} out of {scrap}"),
    "choose": ("shop", "choose {choice}"),
    "measure": ("measure", "measure {measurable}"),
    "tie": ("life", "tie {knot}"),
}
# Families with long lists of tasks get a second turn in each round.
OFTEN = ("job_home", "job_people", "job_food", "money", "life", "write", "cook", "fix")
HELD_FAMILIES = ("sharpen", "tie", "measure", "track", "pack", "weather")

CONSTRAINTS = {
    "clean": """without bleach; with things from the kitchen cupboard; in a rented flat; before
        guests arrive; without damaging anything; with sensitive skin; in ten minutes; without hot
        water; while the shops are closed; with a child helping""",
    "garden": """without chemicals; in a dry summer; as a beginner; in a small courtyard; with
        children and a dog around; near the sea; on a low budget; with little time; in a cold
        region; in a shared garden""",
    "store": """in a tiny kitchen; without plastic; without a freezer; in a hot climate; in a
        shared fridge; in a caravan; without special containers; in a student flat""",
    "cook": """without an oven; in a tiny kitchen; on a low budget; with only one pan; for someone
        who cannot eat nuts; without a blender; with a toddler around; in a hostel kitchen; with
        few spices; without kitchen scales; for picky eaters; on a camping stove""",
    "swap": """for a vegan guest; with things from a corner shop; for someone with allergies; on a
        low budget; without changing the taste; in a hurry; for a big batch; with less fat""",
    "kitchen": """in a tiny kitchen; without special tools; for the first time; in a hurry; in a
        holiday flat; at a campsite; without making a mess""",
    "repair": """without a drill; without calling a professional; in a small flat; with basic
        tools; without waking the neighbours; in an old house; without a helper; under 20 euros; on
        a Sunday; without leaving marks""",
    "measure": """without a tape measure; with a piece of string; without a helper; well enough to
        order online; in five minutes; without an app""",
    "road": """by the roadside; without special tools; in the rain; in the dark; before a long
        trip; with cold fingers; for the first time; without a garage; in a few minutes; on an
        older model""",
    "office": """without paid software; on an old laptop; in under an hour; without asking the IT
        desk; from a phone; with a slow connection; for a team of five; without any training; at a
        small charity; in a home office""",
    "text": """in under an hour; in plain language; without sounding cold; in ten lines; in a
        foreign language; with a bit of humour; without a template; on behalf of the boss""",
    "order": """in a small flat; with almost no money; in one afternoon; together with two
        children; without buying anything; in a shared house; in a way that lasts; with very little
        space; without special skills; before moving out""",
    "people": """when everyone is busy; without hurting feelings; in fifteen minutes; with very
        little notice; in a multilingual team; without spending money; without an argument; in the
        first week; as the youngest in the group; when people live far apart""",
    "explain": """in two minutes; without drawings; with an example from the kitchen; over the
        phone; without difficult words; with a small experiment; in three sentences; without being
        boring""",
    "money": """on a small income; as a student; without a lawyer; in a shared household; before
        the end of the month; for a small club; with an irregular income; without getting stressed;
        at short notice; with little experience""",
    "thrift": """in an old building; with children; without buying new machines; in a shared house;
        in winter; with simple habits; without extra work; in a rented place""",
    "shop": """on a small budget; online; without wasting a whole day; as a first-time buyer; for
        someone who is hard to please; in a small town; without being talked into extras; with
        little experience""",
    "travel": """without a car; without a helper; on a small budget; in the rain; in one day;
        without a lift; with borrowed boxes; at short notice; with a sore back; with help from one
        friend""",
    "prepare": """in one day; without a helper; with things I have at home; at short notice; on a
        small budget; before the holidays; with two helpers; without a car""",
    "life": """after a long day; with little free time; in a noisy house; without an app; at sixty;
        while travelling; with a full-time job; in winter; without spending money; as a
        beginner""",
}

HOME_DOMAINS = {"clean", "repair"}

# Verbs that double their last letter before -ing.
# fmt: off
DOUBLED = {
    "cancel", "cut", "fit", "get", "level", "plan", "put", "reset", "run", "set", "split", "stop",
    "strip", "top", "whip", "wrap",
}
# fmt: on


def gerund(task):
    """'set up a printer' -> 'setting up a printer'."""
    verb, _, rest = task.partition(" ")
    if verb.endswith("ie"):
        verb = verb[:-2] + "ying"
    elif verb in DOUBLED:
        verb += verb[-1] + "ing"
    elif verb.endswith("e") and not verb.endswith("ee"):
        verb = verb[:-1] + "ing"
    else:
        verb += "ing"
    return f"{verb} {rest}"


def how_to(writer, family):
    """One how-to question: a task, maybe a constraint, in a question frame."""
    rng = writer.rng
    domain, template = FAMILIES[family]
    task = writer.write(template, tidy=False)
    if rng.random() < 0.4:
        task += " " + writer.draw_from(f"constraint_{domain}")
    text = writer.write("{frame}", {"task": task, "doing": gerund(task)})
    extra = rng.random()
    if extra < 0.2:
        lead = "{home_lead}" if domain in HOME_DOMAINS and rng.random() < 0.6 else "{lead}"
        text = writer.write(lead) + " " + text
    elif extra < 0.4:
        text += " " + writer.write("{ending}")
    if rng.random() < 0.08:  # typed in a hurry
        text = text[0].lower() + text[1:].rstrip("?.")
    return text, text


# ---------------------------------------------------------------------------------------------
# word_problem: story shapes. Numbers are drawn until every step is a positive whole number.
# ---------------------------------------------------------------------------------------------

STORIES = {}


def story(name, numbers, steps, *tells):
    """Registers a shape: `numbers` are (low, high[, step]), `steps` the solution, last the answer.

    In a telling, {k} is a number, {p$} an amount of money and {f/} the fraction one over f.
    """
    STORIES[name] = (numbers, steps, tells)


story(
    "packs",
    {"k": (3, 9), "n": (6, 24), "u": (7, 60)},
    lambda k, n, u: [k * n, k * n - u],
    "{name.a} buys {k} [packs|boxes|bags] of {item.x} with {n} in each. {u} of them are used for"
    " {event}. How many {item.x} are left?",
    "There are {k} boxes of {item.x} in {place}, and every box holds {n}. After {name.a} hands"
    " out {u}, how many remain?",
    "For {event}, {group} order {k} cartons of {n} {item.x}. It turns out that {u} are damaged."
    " How many good ones are there?",
    "A [courier|van|cyclist] brings {k} parcels to {company}, each with {n} {item.x} inside."
    " {group} take {u} of the {item.x} home. What is left for the office?",
)
story(
    "split_bill",
    {"a": (24, 90), "b": (8, 40), "c": (4, 15), "g": (3, 8)},
    lambda a, b, c, g: [a + b + c, (a + b + c) / g],
    "[Dinner|Lunch|Brunch] costs {a$}, drinks are {b$} and the tip is {c$}. {g} friends share"
    " everything equally. What does each person pay?",
    "{name.a} paid {a$} for train tickets, {b$} for lunch and {c$} for a map. The cost is shared"
    " equally by {g} people. How much is each share?",
    "A gift for {name.a} costs {a$}, the flowers {b$} and the card with postage {c$}. How much"
    " must each of the {g} colleagues give if they all pay the same?",
    "{group} rent {place} for {a$} and pay {b$} for heating and {c$} for cleaning. {g} people"
    " split it evenly. Work out the amount per person.",
    "At the end of a trip to {city}, {name.a} adds up {a$} for rooms, {b$} for food and {c$} for"
    " tolls. If {g} travellers share this, what does one of them owe?",
)
story(
    "two_legs",
    {"v": (11, 22), "t": (2, 4), "w": (6, 14), "s": (2, 3)},
    lambda v, t, w, s: [v * t, w * s, v * t + w * s],
    "{name.a} cycles for {t} hours at {v} km per hour, rests, and then rides another {s} hours"
    " at {w} km per hour. How far is the whole ride?",
    "On the way to {city}, a [barge|steam train|tractor] covers {v} km each hour for {t} hours"
    " and {w} km each hour for the next {s} hours. What distance is that in total?",
    "A pump moves {v} litres a minute for {t} minutes. Then it slows to {w} litres a minute for"
    " {s} more minutes. How many litres were pumped altogether?",
)
story(
    "scale_recipe",
    {"s": (2, 8), "q": (80, 600, 20), "g": (5, 24)},
    lambda s, q, g: [q / s, q / s * g],
    "A recipe for {s} people needs {q} grams of [flour|rice|lentils|potatoes|pasta|sugar]."
    " {name.a} cooks for {g} people. How many grams are needed?",
    "To make {dish} for {s} guests, {name.a} uses {q} ml of [stock|milk|water|cream]. This time"
    " there are {g} guests. How many ml does that take?",
    "{q} ml of [dye|glue|varnish|slip] are enough for {s} [lamps|masks|trays|bowls]. How many ml"
    " should {name.a} buy for {g} of them?",
    "{s} identical [pipes|posts|panels|stones] weigh {q} kg together. {company} loads {g} of"
    " them onto a truck. How heavy is the load?",
)
story(
    "tank",
    {"c": (40, 200, 10), "i": (9, 30), "o": (2, 8), "t": (4, 15)},
    lambda c, i, o, t: [i - o, (i - o) * t, c + (i - o) * t],
    "A [rain barrel|pond|water tank] holds {c} litres. Each minute {i} litres flow in and {o}"
    " litres leak out. How many litres does it hold after {t} minutes?",
    "{name.a} starts filling a paddling pool that already has {c} litres in it. The hose adds"
    " {i} litres a minute, but {o} litres a minute escape through a hole. What is in the pool"
    " after {t} minutes?",
    "{company} has {c} [crates|pallets|bags] in stock. Every day {i} come in and {o} go out."
    " What is the stock after {t} days?",
)
story(
    "wages",
    {"h": (3, 8), "d": (3, 6), "r": (11, 24), "b": (10, 60, 5)},
    lambda h, d, r, b: [h * d, h * d * r, h * d * r - b],
    "{name.a} works {h} hours a day for {d} days and earns {r$} an hour. {b$} are taken off for"
    " [the uniform|meals|transport|union fees]. How much is paid out?",
    "A [gardener|painter|tutor|babysitter|cleaner] charges {r$} per hour. {name.a} books {h}"
    " hours on each of {d} days and has a voucher worth {b$}. What is the bill after the voucher?",
    "For {event}, {name.a} rents a [tent|stage|sound system] for {h} hours on each of {d} days"
    " at {r$} an hour, less a discount of {b$}. How much is owed to {company}?",
)
story(
    "seats",
    {"r": (8, 20), "s": (9, 25), "x": (15, 60), "y": (10, 90)},
    lambda r, s, x, y: [r * s, r * s - x, r * s - x - y],
    "A [hall|theatre|tent|lecture room] has {r} rows of {s} seats. {x} seats are kept for [the"
    " choir|sponsors|families|speakers] and {y} are already sold. How many seats can still be"
    " sold?",
    "For {event}, {group} set out {r} rows with {s} chairs each. {x} chairs are broken and {y}"
    " are reserved. How many chairs are free?",
    "{r} trays with {s} {food_unit.x} each go to {show}. {x} are eaten by helpers and {y} are"
    " sold. What number of {food_unit.x} is left on the trays?",
)
story(
    "fence",
    {"r": (6, 30), "w": (4, 20), "p": (5, 25)},
    lambda r, w, p: [2 * (r + w), 2 * (r + w) * p],
    "A rectangular [vegetable bed|paddock|playground|dog run] is {r} metres long and {w} metres"
    " wide. Fencing costs {p$} per metre. What does it cost to fence all four sides?",
    "{name.a} wants to put [edging|a hedge|a rope barrier] around a rectangle of {r} by {w}"
    " metres. One metre costs {p$}. How much money is needed?",
    "{name.a} sews a border on a rectangular [curtain|flag|quilt|banner] that is {r} cm by {w}"
    " cm. Each cm of border takes {p} stitches. How many stitches does the whole border take?",
)
story(
    "tiles",
    {"r": (3, 12), "w": (2, 8), "c": (2, 6), "p": (14, 45)},
    lambda r, w, c, p: [r * w, r * w / c, r * w / c * p],
    "A floor measures {r} by {w} metres. One box of [tiles|cork boards|laminate] covers {c}"
    " square metres and costs {p$}. What does it cost to cover the whole floor?",
    "{name.a} lays [turf|decking|paving] on an area {r} metres long and {w} metres wide. Each"
    " pack is enough for {c} square metres. If a pack is {p$}, what is the total price?",
    "A field of {r} by {w} metres is sown with clover. A bag of seed is enough for {c} square"
    " metres and costs {p$}. Find the cost of the seed.",
)
story(
    "saving",
    {"w": (8, 45), "n": (5, 20), "c": (40, 400, 5)},
    lambda w, n, c: [w * n, w * n - c],
    "{name.a} puts {w$} into a jar every week. After {n} weeks, {c$} go on [a used bike|new"
    " shoes|a coat|a trip to {city}|a tent]. How much money stays in the jar?",
    "Each [month|week] {group} set aside {w$}. After {n} payments they spend {c$} on {event}."
    " What is left?",
    "{name.a} sells {n} [paintings|baskets|scarves|jars of honey] for {w$} each and pays {c$}"
    " for the stall and materials. What profit is made?",
)
story(
    "discount",
    {"p": (20, 400, 10), "d": (10, 50, 5), "f": (3, 15)},
    lambda p, d, f: [p * d / 100, p - p * d / 100, p - p * d / 100 + f],
    "A [jacket|lamp|chair|blender|rucksack|rug] costs {p$}. In the sale it is {d} percent"
    " cheaper, but delivery adds {f$}. What does {name.a} pay?",
    "{company} takes {d} percent off an order of {p$} and then charges {f$} for shipping. How"
    " much is the invoice?",
    "The usual price of a night in {city} is {p$}. In {month} it drops by {d} percent, but there"
    " is a tourist tax of {f$}. What is the price per night then?",
)
story(
    "tasks",
    {"h": (2, 5), "a": (15, 75, 5), "b": (10, 60, 5), "c": (5, 40, 5)},
    lambda h, a, b, c: [h * 60, a + b + c, h * 60 - a - b - c],
    "{name.a} has {h} hours. [Cleaning|Sorting|Painting] {place} takes {a} minutes, shopping"
    " takes {b} minutes and a call takes {c} minutes. How many minutes are left?",
    "A meeting room is booked for {h} hours. The report takes {a} minutes, the discussion {b}"
    " minutes and the coffee break {c} minutes. How many minutes of the booking are not used?",
    "The oven at {company} is free for {h} hours. Bread takes {a} minutes, a cake {b} minutes"
    " and rolls {c} minutes, one after the other. For how many minutes is the oven empty?",
)
story(
    "reading",
    {"t": (160, 480, 10), "p": (12, 40), "d": (3, 9), "e": (3, 10)},
    lambda t, p, d, e: [p * d, t - p * d, (t - p * d) / e],
    "A book has {t} pages. {name.a} reads {p} pages a day for {d} days and wants to finish it in"
    " {e} more days. How many pages a day is that?",
    "{name.a} must check {t} [records|labels|invoices|photos]. On each of the first {d} days {p}"
    " get checked. The rest must be spread equally over {e} days. How many per day?",
    "{company} has to deliver {t} [meals|letters|newspapers|boxes]. In the first {d} hours the"
    " drivers manage {p} an hour. They have {e} hours left. How many per hour must they deliver"
    " now?",
)
story(
    "ages",
    {"a": (4, 30), "x": (2, 15), "y": (2, 12)},
    lambda a, x, y: [a + x, a + y, a + x + y + a + y],
    "{name.a} is {a} years old and {name.b} is {x} years older. What will their ages add up to"
    " in {y} years?",
    "A [tree|tortoise|clock|house] is {a} years old. Its neighbour is {x} years older. In {y}"
    " years, what is the sum of both ages?",
    "{name.a} started working at {company} {a} years ago, and {name.b} started {x} years before"
    " that. When {y} more years have passed, how many years of service will they have together?",
)
story(
    "bus",
    {"a": (12, 45), "b": (3, 20), "c": (4, 25), "d": (5, 18)},
    lambda a, b, c, d: [a - b, a - b + c, a - b + c - d],
    "A [bus|tram|ferry|train carriage] leaves {city} with {a} passengers. At the first stop {b}"
    " get off and {c} get on. At the next stop {d} get off. How many are on board now?",
    "There are {a} {item.x} in {place} in the morning. {name.a} takes {b}, a delivery brings"
    " {c}, and {name.b} takes {d}. How many {item.x} are there in the evening?",
    "A lending library has {a} [tents|puzzles|drills|board games] on its shelf. {b} are lent"
    " out, {c} come back, then {d} are lent out. How many are on the shelf?",
    "A [kennel|stable|shelter] looks after {a} animals. During {month} {b} of them find a home,"
    " {c} arrive, and in the next month {d} leave. How many animals are there at the end?",
)
story(
    "fraction",
    {"t": (24, 180, 6), "f": (2, 6), "e": (4, 40)},
    lambda t, f, e: [t / f, t - t / f, t - t / f - e],
    "{name.a} bakes {t} {food_unit.x}. {f/} of them go to {group}, and {e} are sold at {event}."
    " How many {food_unit.x} are left?",
    "A roll has {t} metres of [cable|fabric|wire|string]. {f/} of it is used in {room} and {e}"
    " metres are used elsewhere. How many metres remain?",
    "{t} people signed up for {event}. {f/} of them cancel, and then {e} more cannot come"
    " because of {reason}. How many still come?",
    "Of {t} {item.x} in a box, {f/} are broken. {name.a} gives away {e} of the good ones. How"
    " many good {item.x} does {name.a} keep?",
)
story(
    "offers",
    {"n": (6, 30), "p": (4, 20), "d": (5, 40, 5), "q": (4, 24)},
    lambda n, p, d, q: [n * p + d, n * q, abs(n * p + d - n * q)],
    "{company.a} sells {goods} at {p$} each plus {d$} for delivery. {company.b} asks {q$} each"
    " with free delivery. For {n} pieces, by how much do the two offers differ?",
    "{name.a} needs {n} {item.x}. One shop wants {p$} apiece and {d$} for postage, another wants"
    " {q$} apiece and no postage. What is the difference in price?",
    "To get to {city}, {n} people can take a coach at {p$} per person plus a booking fee of"
    " {d$}, or a train at {q$} per person. How large is the difference between the two totals?",
)
story(
    "printing",
    {"c": (12, 60, 2), "g": (4, 30), "m": (6, 30)},
    lambda c, g, m: [c * g, c * g / m],
    "{name.a} prints {c} copies of a [programme|menu|report|songbook] with {g} pages each. The"
    " printer makes {m} pages a minute. How many minutes does it take?",
    "{c} [boxes|crates|shelves] hold {g} {item.x} each. A helper can label {m} {item.x} in a"
    " minute. How long does it take to label all of them?",
    "{company} received {c} orders of {g} {item.x} each. A machine wraps {m} pieces a minute."
    " After how many minutes is everything wrapped?",
)
story(
    "seedlings",
    {"r": (5, 14), "n": (6, 20), "x": (3, 30), "t": (4, 12)},
    lambda r, n, x, t: [r * n, r * n - x, (r * n - x) / t],
    "{name.a} plants {r} rows of {n} [seedlings|bulbs|cuttings]. {x} do not survive. The others"
    " are sold in trays of {t}. How many full trays is that?",
    "At {event}, {group} decorate {r} sheets with {n} {food_unit.x} each. {x} are eaten at once,"
    " and the rest go into boxes of {t}. How many boxes are filled?",
    "A class of {r} groups makes {n} paper stars each. {x} stars are torn. The good stars are"
    " hung on strings with {t} stars each. How many strings can be filled?",
)
story(
    "fuel",
    {"d": (100, 900, 50), "r": (4, 12), "p": (2, 3)},
    lambda d, r, p: [d * r / 100, d * r / 100 * p],
    "A [van|car|minibus] uses {r} litres of fuel per 100 km, and a litre costs {p$}. What does"
    " the fuel for the {d} km trip to {city} cost?",
    "{name.a} drives {d} km to visit {name.b}. The car needs {r} litres for every 100 km at {p$}"
    " per litre. How much does the trip cost in fuel?",
    "A boiler burns {r} litres of oil for every 100 hours, and oil costs {p$} a litre. What does"
    " it cost to run it for {d} hours?",
)
story(
    "supply",
    {"b": (2, 8), "n": (12, 60, 2), "u": (2, 8)},
    lambda b, n, u: [b * n, b * n / u],
    "{group} have {b} packets with {n} [teabags|coffee pods|vitamin tablets|dog biscuits] each"
    " and use {u} a day. How many days will they last?",
    "{b} rolls of stickers have {n} pieces each. Every parcel from {company} gets {u} stickers."
    " How many parcels can be done?",
    "{name.a} buys {b} sacks with {n} [logs|onions|oranges|potatoes] in each. {group} get"
    " through {u} of them every day. When will they run out, in days?",
)
story(
    "parking",
    {"f": (3, 9), "r": (2, 5), "h": (3, 10)},
    lambda f, r, h: [h - 1, (h - 1) * r, f + (h - 1) * r],
    "[Parking|Renting a kayak|A bike locker|A court] on {street} costs {f$} for the first hour"
    " and {r$} for every further hour. What does {name.a} pay for {h} hours?",
    "A [courier|copy shop|taxi service|messenger] charges {f$} for the first parcel and {r$} for"
    " each one after that. {name.a} sends {h} parcels to {city}. What is the price?",
    "{company} lends a [drill|tent|projector|pressure washer] for {f$} on the first day and {r$}"
    " on each later day. {name.a} keeps it for {h} days. How much is the bill?",
)
story(
    "mix",
    {"a": (2, 5), "b": (3, 7), "t": (12, 120)},
    lambda a, b, t: [a + b, t / (a + b), t / (a + b) * b],
    "Orange paint is mixed from {a} parts yellow and {b} parts red. {name.a} needs {t} litres"
    " for {room}. How many litres of red does that take?",
    "A potting mix has {a} scoops of sand for every {b} scoops of compost. {name.a} fills {t}"
    " scoops into [pots|troughs|a raised bed]. How many of them are compost?",
    "At {event}, {a} people want coffee for every {b} who want tea. {name.a} hands out {t} cups,"
    " one each. How many cups of tea is that?",
)
story(
    "average",
    {"x": (20, 90), "y": (20, 90), "z": (20, 90)},
    lambda x, y, z: [x + y + z, (x + y + z) / 3],
    "{name.a} sells {x} {food_unit.x} on {day}, {y} on the next day and {z} on the third day."
    " What is the average per day?",
    "Three [meters|crates|rooms|hives] give readings of {x}, {y} and {z}"
    " [units|kilos|degrees|litres]. What is their mean?",
    "{name.a} timed three walks to {street}: {x}, {y} and {z} minutes. Work out the average time"
    " of a walk.",
)
story(
    "average_target",
    {"m": (20, 60), "x": (15, 60), "y": (15, 60), "z": (15, 60)},
    lambda m, x, y, z: [m * 4, x + y + z, m * 4 - x - y - z],
    "{name.a} wants to [walk|run|cycle|swim] {m} km a week on average over four weeks. The first"
    " three weeks were {x}, {y} and {z} km. How far must it be in week four?",
    "{company} aims for an average of {m} orders a day over four days. So far there were {x},"
    " {y} and {z}. How many orders are needed on the fourth day?",
    "A student needs an average of {m} points in four tests. The first three gave {x}, {y} and"
    " {z} points. How many points does the last test have to bring?",
)
story(
    "subscription",
    {"m": (6, 30), "y": (60, 300, 5)},
    lambda m, y: [m * 12, m * 12 - y],
    "A [gym|streaming|museum|software|newspaper] plan costs {m$} per month or {y$} for a full"
    " year. How much does the yearly plan save?",
    "{name.a} pays {m$} each month for [a locker|a storage unit|a phone line|a bus pass]."
    " {company} offers a year for {y$}. What is the saving over one year?",
    "{group} rent {room} for {m$} a month. The owner would also take {y$} for twelve months at"
    " once. How much cheaper is that?",
)
story(
    "change",
    {"n": (2, 9), "p": (2, 9), "k": (2, 6), "q": (3, 12), "P": (50, 100, 50)},
    lambda n, p, k, q, P: [n * p, k * q, n * p + k * q, P - n * p - k * q],
    "{name.a} buys {n} {item} at {p$} each and {k} {food_unit} at {q$} each, and pays with {P$}."
    " How much change is due?",
    "At {event}, {n} coffees at {p$} and {k} plates of {food_unit} at {q$} are ordered. {name.a}"
    " hands over {P$}. What comes back?",
    "{name.a} sends {n} parcels at {p$} each and {k} parcels at {q$} each and gives the clerk"
    " {P$}. How much money comes back?",
)
story(
    "load",
    {"n": (3, 12), "w": (8, 25), "m": (2, 8), "v": (15, 60), "L": (300, 900, 50)},
    lambda n, w, m, v, L: [n * w + m * v, L - n * w - m * v],
    "A [lift|trailer|raft|van] may carry {L} kg. {n} boxes of {w} kg and {m}"
    " [machines|sacks|barrels] of {v} kg are already in it. How many kg can still be added?",
    "{company} can store {L} kg in {room}. {n} crates weigh {w} kg each and {m} crates weigh {v}"
    " kg each. How much capacity is left?",
    "A farm has room for {L} kg of hay. {n} small bales of {w} kg and {m} large bales of {v} kg"
    " are stacked already. How many kg more will fit?",
)
story(
    "pair_work",
    {"a": (6, 25), "b": (5, 20), "h": (3, 8), "T": (100, 400, 10)},
    lambda a, b, h, T: [a + b, (a + b) * h, T - (a + b) * h],
    "{name.a} can [count|pack|label|sort] {a} {item.x} an hour and {name.b} can do {b}. They"
    " work together for {h} hours. {T} are ordered. How many are still to do?",
    "Two machines at {company} make {a} and {b} parts per hour. Both run for {h} hours. How many"
    " parts are missing to reach {T}?",
    "{name.a} types {a} [pages|labels|addresses] an hour, and {name.b} types {b}. After {h}"
    " hours of typing side by side, how many of the {T} are not typed yet?",
)
story(
    "teams",
    {"T": (24, 120), "x": (2, 15), "g": (3, 9)},
    lambda T, x, g: [T - x, (T - x) / g],
    "{T} people come to {event}, but {x} only watch. The others form groups of {g}. How many"
    " groups are there?",
    "{name.a} collects {T} eggs and {x} are cracked. The good ones are packed {g} to a box. How"
    " many boxes are needed?",
    "There were {T} [chairs|bikes|tents] to repair. {x} were thrown away and the rest shared"
    " equally by {g} helpers. How many did each helper repair?",
    "{name.a} gets {T$} for old [records|coins|furniture], spends {x$} on stamps and shares the"
    " rest equally with friends, so that {g} people get the same. How much does one person get?",
)
story(
    "ribbon",
    {"L": (3, 15), "n": (4, 18), "c": (15, 80, 5)},
    lambda L, n, c: [L * 100, n * c, L * 100 - n * c],
    "{name.a} has {L} metres of [ribbon|rope|tape|lace] and cuts off {n} pieces of {c} cm. How"
    " many cm are left?",
    "A plank is {L} metres long. For a [shelf|frame|ladder|bench] {n} parts of {c} cm are sawn"
    " off. What length in cm remains?",
    "A jug holds {L} litres and one litre is 100 cl. {name.a} pours {n} glasses of {c} cl. How"
    " many cl are still in the jug?",
)
story(
    "storage",
    {"n": (8, 40), "v": (25, 150, 5), "m": (20, 90), "w": (3, 9), "C": (4000, 16000, 1000)},
    lambda n, v, m, w, C: [n * v, m * w, C - n * v - m * w],
    "A memory card holds {C} MB. {name.a} saves {n} videos of {v} MB and {m} photos of {w} MB."
    " How many MB are free?",
    "{name.a} has {C} points in a [loyalty|museum|supermarket] account, then spends {v} points {n}"
    " times and {w} points {m} times. How many points are left?",
    "A town library owns {C} books. {n} schools borrow {v} books each and {m} clubs borrow {w}"
    " each. How many books stay in the library?",
)
story(
    "temperature",
    {"t": (4, 14), "a": (5, 14), "b": (3, 16), "n": (2, 5), "d": (2, 4)},
    lambda t, a, b, n, d: [t + a, t + a - b, t + a - b + n * d],
    "In {city} it is {t} degrees at dawn. By noon it is {a} degrees warmer, at night it falls by"
    " {b} degrees, and then it rises by {d} degrees an hour for {n} hours. How warm is it then?",
    "A river is {t} cm above its normal level. It rises by {a} cm after a storm, drops by {b}"
    " cm, and later gains {d} cm a day for {n} days. How far above normal is it now?",
    "{name.a} has {t} points in a game, wins {a}, loses {b}, and then wins {d} points in each of"
    " {n} rounds. What is the final score?",
)
story(
    "tickets",
    {"a": (15, 80), "p": (6, 18), "c": (10, 60), "q": (2, 5), "x": (50, 300, 10)},
    lambda a, p, c, q, x: [a * p, c * q, a * p + c * q - x],
    "For {show}, {a} adult tickets are sold at {p$} and {c} child tickets at {q$}. Renting the"
    " hall costs {x$}. What is the profit?",
    "{company} lends {a} large tables for {p$} each and {c} chairs for {q$} each. Transport"
    " costs {x$}. How much is earned after transport?",
    "{name.a} keeps {a} hens that bring {p$} each a year and {c} ducks that bring {q$} each."
    " Feed costs {x$}. How much remains?",
)
story(
    "laundry",
    {"n": (12, 60), "m": (6, 40), "t": (6, 15), "u": (35, 90, 5)},
    lambda n, m, t, u: [n + m, (n + m) / t, (n + m) / t * u],
    "A guest house has {n} towels and {m} sheets to wash. One load takes {t} pieces and runs {u}"
    " minutes. With one machine, how many minutes does it take?",
    "{name.a} has {n} small and {m} large [pots|bowls|cups] to fire. The kiln holds {t} pieces"
    " and needs {u} minutes per run. How long does it take in all?",
    "A school takes {n} pupils and {m} parents across a lake. The boat carries {t} people, and a"
    " trip there and back takes {u} minutes. How many minutes does the ferry service need for"
    " everyone?",
)
story(
    "borrow",
    {"L": (200, 1500, 20), "w": (20, 90, 5), "n": (3, 10), "m": (3, 12)},
    lambda L, w, n, m: [w * n, L - w * n, (L - w * n) / m],
    "{name.a} borrows {L$} from {name.b} and pays back {w$} a month for {n} months. The rest is"
    " paid in {m} equal parts. How large is each part?",
    "A [sofa|repair|course|wedding cake] for {L$} is paid with {n} instalments of {w$}. What"
    " remains is split evenly over {m} months. What is due per month?",
    "{company} must repair {L} metres of road. The workers do {w} metres a week for {n} weeks."
    " The remaining part has to be done in {m} weeks. How many metres a week is that?",
)
story(
    "pet_food",
    {"g": (2, 15), "d": (50, 400, 10), "p": (2, 6)},
    lambda g, d, p: [g * 1000, d * p, g * 1000 / (d * p)],
    "A bag holds {g} kg of [cat|dog|chicken|rabbit] food. {name.a} has {p} animals, and each"
    " eats {d} grams a day. How many days does the bag last?",
    "{company} keeps {g} kg of [flour|coffee|salt|wax] and uses {d} grams for each batch, with"
    " {p} batches a day. After how many days is it used up?",
    "A [ship|cabin|station] has {g} kg of rice. {p} people live there and each eats {d} grams a"
    " day. For how many days is there enough?",
)
story(
    "candles",
    {"r": (18, 40), "c": (2, 4), "h": (2, 7), "x": (2, 5)},
    lambda r, c, h, x: [c * h, r - c * h, r - c * h - x * c],
    "A candle is {r} cm long and burns down {c} cm every hour. It burns for {h} hours on {day}"
    " and {x} hours on the next evening. How long is it then?",
    "{name.a} fills a {r} litre [canister|barrel|tank]. {c} litres are used each hour for {h}"
    " hours, and after a break for {x} more. How many litres are left?",
    "A rope is {r} metres long. {name.a} cuts off {c} metres on each of {h} days and the same"
    " length on {x} further days. How many metres of rope are there in the end?",
)
story(
    "backwards",
    {"e": (10, 90, 2), "g": (4, 30)},
    lambda e, g: [e / 2, e / 2 + g],
    "{name.a} had some {item.x}. After giving {g} to {name.b}, {name.a} doubled what was left"
    " and now has {e}. How many {item.x} were there at the start?",
    "A number of guests came to {event}. When {g} had gone home, the number doubled because a"
    " second group arrived, and {e} were there. How many came first?",
    "{name.a} thinks of a number, subtracts {g} and multiplies the result by two. The result is"
    " {e}. What was the number?",
)
story(
    "walks",
    {"a": (4, 12), "b": (6, 20), "w": (2, 6)},
    lambda a, b, w: [5 * a, 2 * b, 5 * a + 2 * b, (5 * a + 2 * b) * w],
    "{name.a} [walks|jogs|rows] {a} km on each of the five weekdays and {b} km on both weekend"
    " days. How many km is that in {w} weeks?",
    "A [cafe|farm shop|kiosk] sells {a} crates of [eggs|lemonade|apples|rolls] a day from Monday"
    " to Friday and {b} a day on Saturday and Sunday. How many crates are sold in {w} weeks?",
    "A [baker|potter|printer] makes {a} boxes of cards on every weekday and {b} on each day of"
    " the weekend. After {w} full weeks, how many boxes are there?",
)
story(
    "bake_sale",
    {"n": (3, 10), "m": (6, 24), "p": (2, 4), "c": (10, 60)},
    lambda n, m, p, c: [n * m, n * m * p, n * m * p - c],
    "{name.a} bakes {n} trays of {m} {food_unit.x} and sells each for {p$}. The ingredients cost"
    " {c$}. How much profit is made?",
    "{group} make {n} sets of {m} {item.x} and sell them all at {p$} apiece. Materials came to"
    " {c$}. What do they earn?",
    "For {show}, {name.a} paints {n} sheets with {m} masks on each. Every mask is sold for {p$},"
    " and the paint costs {c$}. What is earned in the end?",
)
story(
    "shelves",
    {"s": (3, 9), "b": (12, 40), "x": (10, 50), "k": (4, 12)},
    lambda s, b, x, k: [s * b, s * b + x, (s * b + x) / k],
    "{s} shelves hold {b} books each. {x} new books arrive, and {name.a} spreads all of them"
    " evenly over {k} shelves. How many books are on each?",
    "{name.a} empties {s} drawers with {b} {item.x} each and adds {x} from a bag. Everything is"
    " divided equally among {k} boxes. How many go into one box?",
    "A choir has {s} folders with {b} songs each and gets {x} new songs. All songs are sorted"
    " into {k} equally thick binders. How many songs does a binder hold?",
)
story(
    "harvest",
    {"p": (3, 9), "k": (4, 12), "w": (5, 18), "e": (20, 200, 10)},
    lambda p, k, w, e: [p * k, p * k * w, p * k * w - e],
    "{p} pickers fill {k} crates each with [plums|pears|olives|grapes|cherries]. A crate weighs"
    " {w} kg. {e} kg are kept for jam. How many kg are sold?",
    "{p} trucks make {k} trips each and bring {w} tonnes of [gravel|sand|snow|soil] per trip."
    " {e} tonnes go to {street}. How many tonnes are left for other places?",
    "{p} bakers make {k} batches each, and a batch gives {w} loaves. {e} loaves go to {company}."
    " How many are left for the shop?",
)
story(
    "water",
    {"n": (3, 9), "d": (2, 5), "r": (2, 4), "c": (5, 40)},
    lambda n, d, r, c: [n * d * r, n * d * r - c],
    "{n} hikers walk for {d} days and each drinks {r} litres a day. They carry {c} litres from"
    " the start. How many litres must they find on the way?",
    "{name.a} plans {r} meals a day for {n} campers over {d} days. {c} meals are ready in the"
    " freezer. How many must still be cooked?",
    "A hotel has {n} floors with {d} lamps each, and a lamp takes {r} bulbs. There are {c} bulbs"
    " in {place}. How many bulbs have to be bought to change all of them?",
)
story(
    "knitting",
    {"r": (6, 15), "w": (5, 12), "x": (8, 40), "y": (3, 12)},
    lambda r, w, x, y: [r * w, r * w - x, (r * w - x) / y],
    "A patchwork blanket has {r} rows of {w} squares. {x} squares are finished, and {name.a}"
    " makes {y} a week. How many weeks are left?",
    "A mosaic on {street} is {r} by {w} tiles. {name.a} has set {x} tiles and sets {y} more each"
    " day. After how many days is it done?",
    "A wall of {r} rows with {w} bricks each is being built. {x} bricks are laid, and {name.a}"
    " lays {y} an hour. In how many hours will the wall be ready?",
)
story(
    "shift",
    {"h": (4, 9), "b": (2, 4), "m": (10, 30, 5), "k": (15, 45, 5)},
    lambda h, b, m, k: [h * 60, h * 60 - b * m, h * 60 - b * m - k],
    "A shift lasts {h} hours with {b} breaks of {m} minutes and {k} minutes for cleaning up. How"
    " many minutes are left for work?",
    "{event} runs for {h} hours. There are {b} speeches of {m} minutes and a meal of {k}"
    " minutes. How many minutes are free for dancing?",
    "{name.a} spends {h} hours in the studio. {b} lessons take {m} minutes each and tidying"
    " takes {k} minutes. How many minutes remain for practice?",
)
story(
    "paint",
    {"r": (4, 12), "h": (2, 4), "n": (2, 3), "c": (4, 12)},
    lambda r, h, n, c: [r * h, r * h * n, r * h * n / c],
    "A wall in {room} is {r} metres long and {h} metres high and needs {n} coats of paint. One"
    " litre covers {c} square metres. How many litres does {name.a} need?",
    "{name.a} varnishes a deck of {r} by {h} metres {n} times. A tin is enough for {c} square"
    " metres. How many tins are used?",
    "{n} lawns, each {r} by {h} metres, get fertiliser. A scoop is enough for {c} square metres."
    " How many scoops does {name.a} need?",
)
story(
    "stairs",
    {"f": (3, 9), "s": (12, 22), "t": (2, 7)},
    lambda f, s, t: [f * s, f * s * 2, f * s * 2 * t],
    "A house on {street} has {f} flights of {s} steps. {name.a} goes up and down {t} times a"
    " day. How many steps is that in all?",
    "The lift in {room} is broken, so {name.a} carries {goods} up {f} floors with {s} steps"
    " each, and comes down again, {t} times. How many steps is that?",
    "{name.a} swims {f} lanes of {s} metres to the far end and back again, {t} times a week. How"
    " many metres is that?",
)
story(
    "growth",
    {"a": (5, 40), "d": (2, 12)},
    lambda a, d: [a + d, a + 2 * d, 3 * a + 3 * d],
    "{name.a} saves {a$} in {month}, {d$} more than that in the second month, and again {d$}"
    " more in the third. How much is saved in three months?",
    "{company} sells {a} {goods} on the first day. Every day the sales go up by {d}. How many"
    " are sold in the first three days together?",
    "A [swimmer|cyclist|reader] does {a} units in the first week and {d} more each following"
    " week. What is the sum of the first three weeks?",
)
story(
    "laps",
    {"n": (5, 20), "m": (200, 800, 50), "g": (6, 20), "x": (2, 9)},
    lambda n, m, g, x: [n * m / 1000, g, n * m * g / 1000 - x],
    "At {event}, {g} [runners|skaters|swimmers|rowers] each do {n} laps of {m} metres. Their"
    " goal was {x} km less than they managed. What was the goal in km?",
    "A [postal worker|park ranger|farmer] does {n} rounds of {m} metres a day for {g} days, but"
    " skips {x} km in total because of {reason}. How many km are covered?",
    "A machine cuts {n} strips of {m} mm from each of {g} rolls. {x} metres of the strips are"
    " thrown away. How many metres of strips are kept?",
)
story(
    "times_more",
    {"a": (6, 40), "k": (2, 5), "x": (3, 20)},
    lambda a, k, x: [a * k, a * k - x, a + a * k + a * k - x],
    "{name.a} collects {a} {item.x}. {name.b} collects {k} times as many, and {name.c} collects"
    " {x} fewer than {name.b}. How many do all three have?",
    "{city.a} gets {a} parcels, {city.b} gets {k} times as many, and {city.c} gets {x} fewer"
    " than {city.b}. How many parcels is that in total?",
    "{name.a} earns {a$} at {event}. {name.b} earns {k} times that, and {name.c} earns {x$} less"
    " than {name.b}. How much do the three earn together?",
)
HELD_STORIES = (
    "tank",
    "backwards",
    "tickets",
    "knitting",
    "offers",
    "stairs",
    "average_target",
    "laps",
)


def whole(value):
    """True for a positive whole number."""
    return value > 0 and abs(value - round(value)) < 1e-9


def draw_numbers(rng, name):
    """Numbers for a story with positive whole steps; no two numbers of one story are the same."""
    numbers, steps, _ = STORIES[name]
    while True:
        values = {key: pick_number(rng, *span) for key, span in numbers.items()}
        distinct = len(set(values.values())) == len(values)
        if distinct and all(whole(step) for step in steps(**values)):
            return values, round(steps(**values)[-1])


def word_problem(writer, name):
    """One arithmetic story of two or three steps."""
    values, _ = draw_numbers(writer.rng, name)
    text = writer.write(pick(writer.rng, STORIES[name][2]), values)
    if writer.rng.random() < 0.2:
        text = pick(writer.rng, OPENINGS) + text
    elif writer.rng.random() < 0.25:
        text += pick(writer.rng, CLOSINGS)
    return text, text


OPENINGS = (
    "Please solve this: ",
    "Can you help with my homework? ",
    "A question from a quiz: ",
    "Help me with this sum. ",
    "My child asks: ",
    "Word problem. ",
    "We need this for planning. ",
    "Solve step by step. ",
)
CLOSINGS = (
    " Show your steps.",
    " Explain your answer.",
    " Please calculate it step by step.",
    " Give only a short solution.",
    " Write down each step.",
    " How did you work it out?",
)


# ---------------------------------------------------------------------------------------------
# note_summary: kinds of notes. A kind is a list of slots parted by empty lines; a line that
# starts with "|" begins another wording of the slot. The first and last slots are always used,
# some of those between are left out.
# ---------------------------------------------------------------------------------------------

NOTE_TEXT = {
    "meeting": """
        Meeting notes, {day}, {room}.
        | Notes from the {day} meeting of {team}.
        | Minutes: {team}, {time}, {3-14} people present.

        {name} reported that {problem}.
        | The main point was that {problem}.
        | We first heard from {name}: {problem}.

        After [a short|a long|some] discussion the group agreed to {decision}.
        | It was decided to {decision}.
        | {name} proposed to {decision}, and [nobody objected|most were in favour|the vote was
          {4-9} to {1-3}].

        A second topic was {event}: {name} will {todo} and {name} will {todo}.
        | For {event} we still need {12-60/4} {goods}.
        | {name} asked whether the [costs|times|tasks] for {event} are settled. They are not.

        {problem}, so we may also have to {decision}.
        | Nobody knows yet why the figures for {month} are missing.
        | [Thanks|A big thank you] to {name} for [the cake|stepping in|the clear slides].

        Before the next meeting {name} should {todo}.
        | Next meeting: {day}, {time}, [same place|{room}|online].
        | Action for {name}: {todo}. Deadline is {day}.
    """,
    "delivery": """
        Delivery note from {company} for {street} {3-98}.
        | Hello, this is {company} about order {1200-9800}.
        | Goods received at {room} on {day}, {time}.

        The driver left {4-40} [boxes|crates|bundles] of {goods} and {2-12} of {goods}.
        | We unloaded {10-60} {goods}, but {2-8} were damaged [in transit|by water|at the corners].
        | Of the {24-90/6} {goods} you ordered, {6-20} are on back order until {month}.

        The {goods} were not on the truck and should follow on {day}.
        | The invoice lists {goods} that nobody here ordered.
        | Two pallets were mixed up with an order for {city}.

        {name} signed for the goods and put them in {place}.
        | Nobody answered the bell, so the parcel is with [the neighbour|the bakery next
          door|{name} in {room}].
        | Because of {reason}, the truck came {2-5} hours late.

        Please keep the pallets, they will be collected on {day}.
        | Fragile items are marked with a [red|yellow] sticker and must not be stacked.
        | The box with the broken seal was photographed and set aside.

        Report anything missing to {name} by {day}.
        | Payment of {120-980/10} euros is due by the end of {month}.
        | Next delivery window: {day}, before {time}.
    """,
    "maintenance": """
        Maintenance log, {room}: {machine}.
        | Service report for {machine}, {day} {time}.
        | Log entry by {name} about {machine}.

        Staff said that it {symptom}, [mostly in the morning|since {month}|after every cleaning].
        | On arrival I found that it {symptom}.
        | Fault as reported: it {symptom} and sometimes {symptom}.

        The {part} was worn, so I replaced it and cleaned the {part}.
        | I tightened the {part}, but the {part} will not last another {2-6} months.
        | The cause was a loose {part}. Repair took {20-90/5} minutes.

        A new {part} was ordered from {company} for about {30-240/10} euros.
        | We had no spare {part} in stock.
        | The old {part} is kept in {place} in case the supplier wants it.

        A test run of {10-60/5} minutes showed no further trouble.
        | It now works, though it is louder than it should be.
        | Until then it must not be used without supervision.

        Next check is due in {month}.
        | {name} has the key to the panel and knows about the reset.
        | Please tell {name} if it {symptom} again.
    """,
    "travel": """
        Travel plan for {city}, {2-6} people, first week of {month}.
        | Hi all, here is how we get to {city} on {day}.
        | Trip notes: {city} and {city}.

        We leave from {street} at {time} with {vehicle} and change once in {city}.
        | {name} drives [the van|a rental car|the old estate car], the others follow by train and
          arrive around {time}.
        | The [cheapest|fastest] way is {vehicle}, which takes about {3-9} hours.

        The rooms are booked for {2-6} nights at {60-140/5} euros a night, breakfast included.
        | We stay with {name}, who has {2-5} spare beds and a cat.
        | The first hotel was full because of {event}, so we are {2-9} km outside.

        On {day} we visit {sight}, and in the afternoon there is time for {sight}.
        | {name} would like to see {sight}; tickets must be bought {2-10} days ahead.
        | If it rains we swap the walk for {sight}.

        Please bring [good shoes|a passport|a rain coat|swimwear|cash] and tell {name} about
          allergies.
        | Luggage is limited to one bag of {8-20} kg.
        | The tickets are in the shared folder, {name} has paper copies.

        We are back on {day} at about {time}.
        | Everyone owes {name} {40-180/5} euros by {day}.
        | Call {name} if you miss the connection.
    """,
    "house_sitting": """
        Dear {name}, thanks for looking after the house while we are in {city}.
        | Notes for the house sitter, {street} {2-80}.
        | Hi {name}, here is what to know until we return on {day}.

        {pet_named} eats at {time} and again in the evening, {40-120/10} grams each time.
        | {pet_named} hides when the bell rings, so please close the door to {place}.
        | Please let {pet_named} out twice a day, but not near {street}.

        The [ferns|herbs|palms|seedlings] need water every {2-4} days, the [orchids|cacti|lilies]
          hardly any.
        | Bins go out on {day} evening: [paper|glass|food waste] this week, [plastic|garden waste]
          next week.
        | The post is in the [blue|metal|left] box, please leave letters from {company} on the
          table.

        [The boiler|The dishwasher|The oven|The doorbell|The television] {symptom}; just turn it
          off and wait {5-20} minutes.
        | If the lights fail, the fuse box is in {place} behind the [coats|ladder|brooms].
        | The heating is set to {16-20} degrees and should stay there.

        A technician from {company} comes on {day} around {time} to look at the {part}.
        | {name} next door has a spare key and a strong back.
        | Help yourself to the [plums|brown bread|soup|yogurt] and the [cheese|cake|tea|lemonade].

        We land at {time} on {day}.
        | In an emergency, call {name}.
        | Please send a short message every few days.
    """,
    "voicemail": """
        Voicemail for {name}, {time}: this is {name} from {company}.
        | Message taken by {name} at {time} on {day}.
        | Hi {name}, it's {name}, I could not reach you on the phone.

        I am calling because {problem}.
        | The appointment on {day} has to move because of {reason}.
        | I looked at {machine}, and it still {symptom}.

        We could offer {day} at {time} or {day} at {time} instead.
        | It would help if someone could {todo} before {day}.
        | The price would be {80-600/20} euros, which is {10-60/5} more than I first said.

        I also wanted to ask if {name} could {todo}.
        | By the way, {name} left {found} in our office.
        | My number is the same, but I am in {city} until {day} and hard to reach.

        {name} already agreed, we only need your word.
        | No need to bring anything, we have the keys to {room}.
        | I will send the papers by post to {street}.

        Please call back before {time}.
        | If I hear nothing by {day}, I will {todo}.
        | Thanks, and say hello to {name}.
    """,
    "handover": """
        Handover from the [early|late|night] shift, {day}.
        | Shift report {day}, written by {name}.
        | To whoever opens tomorrow:

        [Quiet|Busy|Strange|Long] shift with {14-90} customers, about {5-30} fewer than last {day}.
        | {name} went home at {time} because of {reason}.
        | We had {2-9} complaints, mostly about waiting times.

        {machine} {symptom}, and {company} has been informed.
        | We are almost out of {goods}; the last {3-12} are in {place}.
        | {system} was down for {10-50/5} minutes because of {it_cause}.

        A guest in {room} lost {found} and left a phone number.
        | A customer returned {2-9} {goods} without a receipt, see the note in the drawer.
        | Someone from {team} asked for {room} on {day} and was told yes.

        The cash box is [short by|over by] {3-18} euros, and I counted it twice.
        | The floor in {place} is still wet.
        | I could not finish [the labels|the ironing|the inventory], {name} knows where I stopped.

        Please {todo} first thing.
        | Do not forget: {name} comes at {time} to {todo}.
        | Open tasks: {todo}, {todo}.
    """,
    "event_plan": """
        Plan for {event}, {day} {3-28} {month}.
        | Notes on {event} so far.
        | {event}: who does what.

        We expect between {20-40} and {50-120/5} guests and doors open at {time}.
        | {room} is booked from {time}, and setting up takes {2-4} hours.
        | {company} lends us {10-60/5} {goods} for {60-200/10} euros.

        {name} and {name} cook {dish} and {dish}; {name} looks after the drinks.
        | Food comes from {company}, {4-9} euros a head, with a vegetarian choice.
        | Everyone brings a dish; so far we have {3-6} cakes and no salad.

        The music is still open because {problem}.
        | If it rains we move everything to {room}.
        | {name} gives a short speech at {time}, then there is a raffle.

        The budget is {300-900/50} euros, of which {80-280/10} are spent.
        | We need {3-8} more helpers for clearing up on {day}.
        | Neighbours on {street} should get a letter about the noise.

        {name} will {todo} by {day}.
        | Please sign up with {name} before {day}.
        | Open question: who can {todo}?
    """,
    "club_notice": """
        Notice to all members of the
          [chess|rowing|gardening|hiking|theatre|sewing|running|astronomy] club.
        | Club news, {month}.
        | Dear members, a few announcements.

        From {month} on we meet on {day}s at {time} in {room}.
        | The [yearly fee|locker fee|late fee] goes up by {3-15} euros, the first change in {4-9}
          years.
        | {room} is closed for {2-5} weeks for [roof works|repairs|a new floor|cleaning].

        {name} steps down as [treasurer|secretary|coach|chair], and {name} takes over for now.
        | We welcome {2-9} new members, among them {name} and {name}.
        | Congratulations to {name}, who came {3-9}th in {city}.

        At {event} we run a stall and need people who can {todo}.
        | The trip to {city} has {3-9} places left and costs {40-160/10} euros.
        | Please return borrowed {goods}; {6-20} are still missing.

        The board voted to {decision}.
        | Some of you wrote that {problem}; we are working on it.
        | Lost keys now cost {15-40/5} euros.

        Questions go to {name}.
        | Please reply by {day} so that we can plan.
        | The next general meeting is on {3-28} {month}.
    """,
    "complaint": """
        To {company}: I am writing about my order of {goods}.
        | Complaint received by {team} on {day}.
        | Dear customer service, this is about {12-48/4} {goods}, order {1200-9800}.

        I paid {45-380/5} euros and expected better quality.
        | The promised date was {3-12} {month}, and I waited {2-5} weeks longer.
        | When I opened the box, {2-9} pieces were broken and {2-5} were missing.

        When I called, {name} said that nothing could be done before {day}.
        | I sent {2-5} emails and got no reply.
        | Your colleague was friendly but gave me a wrong [form|address|price].

        As a result I had to [buy replacements|cancel a dinner|take a day off|sleep at a friend's
          place].
        | This is the second time this year; in {month} the reason was {reason}.
        | The photos attached show the damage.

        I would like [my money back|a new delivery|a discount of {10-40/5} percent|a written
          apology].
        | Apart from that, the [price|packaging|colour|first contact] was good.
        | I have been a customer for {3-15} years.

        Please answer by {day}.
        | Otherwise I will change to another supplier.
        | You can reach me after {time}.
    """,
    "inventory": """
        Stock check in {place}, {day}, done by {name} and {name}.
        | Inventory notes {month}.
        | Counting results for {team}.

        We counted {20-90} {goods}, {4-19} fewer than the list says.
        | There are {100-400/10} {goods}, enough until {month}.
        | Of the {goods}, only {2-9} are left and {company} needs {2-4} weeks to deliver.

        {3-12} {goods} are past their date and were thrown away.
        | {5-25} {goods} have water damage after [a burst pipe|a storm|a leak in the roof].
        | Two shelves of {goods} carry the wrong label.

        The most likely reason is that {problem}.
        | Items lent out for {event} never came back.
        | {name} thinks that deliveries were counted twice.

        The value of the missing items is about {60-450/10} euros.
        | We moved heavy things to the bottom shelf and freed {2-6} square metres.
        | A colour code would help: red for {team}, blue for {team}.

        {name} orders {goods} today.
        | Next count in {month}, please plan {2-5} hours.
        | Suggestion: {decision}.
    """,
    "landlord": """
        Notice to all residents of {street} {3-90}.
        | Dear tenants, please note the following.
        | House notice, {month}.

        On {day} between {time} and {time} the [water|power|heating|internet] will be turned off.
        | {company} will [clean the gutters|replace the windows|read the meters|repair the lift]
          from {day} on.
        | Work on {machine} takes {2-8} days longer because of {reason}.

        Please clear {place}, as the workers need {2-4} metres of space.
        | Someone must be at home, or leave a key with {name}.
        | Bikes without a name tag will be removed from {place}.

        There will be noise [until noon|from {time}|on {2-5} mornings] and some dust.
        | Parking in front of the house is not possible until {day}.
        | The laundry room can be used until {time} only.

        Several of you said that {problem}; we have passed this on.
        | The side costs rise by {4-18} euros a month from {month}.
        | We also found {found} near the letter boxes.

        Thank you for your patience.
        | Questions: {name}, ground floor, {day}s after {time}.
        | We will inform you when all is done.
    """,
    "recipe_trial": """
        Test kitchen, {day}: {dish}, attempt {2-5}.
        | Tasting notes for {menu_item.x}, tried by {3-9} people.
        | Recipe trial at the cafe, {month}.

        We used {100-400/20} grams of {ingredient.x} instead of butter and baked it {5-20} minutes
          longer.
        | {name} replaced the {ingredient} with {ingredient} and halved the salt.
        | The batch was doubled for {20-60/5} portions, and the pan was too small.

        It was {taste}, and two tasters called it {taste}.
        | Most liked the smell, but it was {taste}.
        | Compared with last time it is less heavy, though {taste}.

        One portion costs {2-4} euros, which is {20-80/5} cents more than planned.
        | Preparation took {25-90/5} minutes, too long for a lunch menu.
        | It keeps for {2-5} days in the fridge.

        If it stays {taste}, it will not go on sale.
        | Guests often ask for it without {ingredient}.
        | The supplier {company} cannot promise fresh [thyme|asparagus|peaches|herbs|crab] in
          {month}.

        Next try: less {ingredient}, and {name} writes down the weights.
        | It goes on the menu from {day}.
        | We taste again on {day} at {time}.
    """,
    "training": """
        Recap of the training on {skill_course}, {day}.
        | Course notes by {name}: {skill_course}.
        | What we learned about {skill_course} in {room}:

        {name} from {company} taught {6-18} of us for {2-5} hours.
        | It started late because of {reason}, and the last part was dropped.
        | Half of the group were new, the others came for the refresher.

        The most important rule: stop, look and tell a colleague before touching anything.
        | We practised in pairs, and the exercise took {15-50/5} minutes.
        | Everyone had to explain one step aloud, which {name} did best.

        Two people failed the test and may repeat it in {month}.
        | The handout is {4-20} pages long and has a checklist on page {2-4}.
        | A common mistake is to skip the check when it gets busy.

        Participants said the pace was [too fast|about right|a bit slow] and the room too
          [warm|small|loud].
        | Several asked for a second part about {skill_course}.
        | We noticed during the course that {problem}.

        Certificates come by post in {2-6} weeks.
        | From {month} nobody works here without this course.
        | {name} will {todo} and share the slides.
    """,
    "budget": """
        Budget note for {month}, prepared by {name}.
        | Short update on money from {team}.
        | Figures for {event}, as of {day}.

        We spent {1100-4800/100} euros, about {5-20} percent more than in the month before.
        | Income was {900-3900/100} euros, mainly from [tickets|fees|rent|a grant|donations].
        | There are {200-900/20} euros left for the rest of the year.

        The largest item was {goods} at {150-700/10} euros.
        | Repairs to {machine} cost {120-640/20} euros and were not planned.
        | {company} raised its prices by {4-15} percent.

        We saved {40-260/10} euros by using the old {goods} again.
        | A refund of {50-250/10} euros from {company} is still missing.
        | One problem remains: {problem}.

        To get back on track we could {decision}.
        | {name} suggests that we {decision}.
        | No new orders above {100-300/50} euros until {month}, please.

        Receipts must reach {name} by {day}.
        | The board looks at this on {day}.
        | A full report follows in {month}.
    """,
    "pet_visit": """
        Vet visit of {pet_named}, {day} {time}.
        | Update on {pet_named} from the pet hotel.
        | Sitter's diary: {pet_named}.

        Weight is {3-28} kg, slightly [more|less] than in {month}.
        | The appetite is [good|poor|better than yesterday], with {50-200/10} grams eaten in the
          morning.
        | {pet_named.b} was calm on the way but did not like the scales.

        There is a small wound on the left [paw|ear|wing|leg], cleaned and covered for {2-6} days.
        | One tooth is loose and should come out in {month}.
        | The itching comes from dry skin, not from fleas.

        The medicine is given twice a day with food for {5-14} days.
        | No long walks until {day}, and no stairs if possible.
        | We changed the food, {2-4} small meals instead of one.

        At night there was some noise, so {name} slept next door.
        | A walk along {street} went well until a bike came by.
        | The favourite toy is still {found}.

        The bill was {45-190/5} euros, insurance pays half.
        | Next appointment: {day} at {time} with {name}.
        | Please call if there is no change by {day}.
    """,
    "it_outage": """
        Incident note: {system} not available on {day}.
        | To all users of {system}.
        | What happened to {system}, written by {name}:

        It went down at {time} and was back {2-6} hours later.
        | About {12-90} people could not log in for {20-90/5} minutes.
        | The first report came from {team} at {time}.

        The cause was {it_cause}, which nobody had noticed since {month}.
        | We suspected {it_cause}, but it turned out to be {it_cause}.
        | {company} confirmed that {it_cause} was to blame.

        {name} restarted the machine, and {name} restored the copy from {day}.
        | As a quick fix we moved everything to an old server in {room}.
        | {3-40} entries made after {time} were lost and must be typed in again.

        No customer data left the house.
        | During the outage orders were taken on paper.
        | {system} was also slow, but for another reason.

        To prevent this, {name} will set up an alarm by {day}.
        | Please change your password by {day}.
        | We will test the backup every {2-6} weeks from now on.
    """,
    "outing": """
        Letter to families: class trip to {sight.x} on {day}.
        | Information about the outing to {city}, {3-28} {month}.
        | Dear parents, we are planning a day at {sight.x}.

        We meet at {time} at the corner of {street} and take {vehicle}.
        | {18-29} children and {3-5} adults are coming.
        | The return is planned for {time}, a little later if traffic is bad.

        The cost is {4-19} euros per child, paid in cash to {name}.
        | The club pays for the tickets, you only pay for lunch.
        | Families who cannot pay may talk to {name} in private.

        Each child needs [a packed lunch|a water bottle|rain clothes|a sun hat] and shoes that may
          get dirty.
        | Phones and toys stay at home.
        | Please tell us about allergies and medicine before {day}.

        A guide will show how people worked there {60-150/10} years ago.
        | The children will make {craft} and take it home.
        | If {sight.x} is closed, we visit {sight} instead.

        Please return the slip by {day}.
        | We still need {2-4} parents who can help.
        | Those who stay at home join {name}'s class.
    """,
    "repair_quote": """
        Quote from {company} for {room}.
        | Summary of the visit by {company} on {day}.
        | {name} looked at {place} and left this estimate.

        Replacing the {part} and the {part} would cost {180-950/10} euros with labour.
        | The work would take {2-8} days and start in {month}.
        | There are two options: a simple repair for {90-280/10} euros or a full exchange for
          {600-1900/50}.

        The price does not include [painting|waste removal|scaffolding|travel].
        | If we order before {day}, we get {5-15} percent off.
        | A deposit of {100-400/50} euros is needed.

        The wall behind is damp, which may come from [a burst pipe|a blocked gutter|last winter].
        | {machine} is {9-25} years old, so parts are hard to find.
        | During the work {room} cannot be used.

        {name} got a second offer from {company}, which is {40-300/10} euros cheaper but without a
          guarantee.
        | The guarantee is {2-6} years.
        | Neighbours recommend them, but {name} had a bad experience.

        The offer is valid until {3-28} {month}.
        | {name} has to decide by {day}.
        | Please {todo} before we sign.
    """,
    "rota_change": """
        Change to the rota, week of {3-28} {month}.
        | Hi team, a few swaps because of {reason}.
        | New duty plan for {team}.

        {name} takes the {day} shift from {name}, starting at {time}.
        | {name} is away until {day}, and {name} and {name} share the early shifts.
        | On {day} we close at {time} instead of {time}.

        {name} will be trained in {skill_course} on {day} and cannot be on the desk.
        | Nobody is free on {day} evening yet.
        | Two people from {team} will help out on {day}.

        Breaks are {20-45/5} minutes and not all at once.
        | Overtime of more than {4-10} hours must be used up by {month}.
        | Please do not swap without telling {name}.

        {event} takes place that week, so expect {20-80/5} more visitors.
        | Keys for {room} are with {name}.
        | Remember that {machine} {symptom}.

        Tell {name} by {day} if this does not work for you.
        | The final plan hangs in {room} from {day}.
        | Thanks for being flexible.
    """,
    "site_visit": """
        Site visit at {street} {5-90}, {day}, {time}.
        | Notes after walking through {room} with {name}.
        | Report on the new rooms for {team}.

        The space is {60-240/10} square metres with {2-6} windows and a low ceiling.
        | It is bright and quiet, but {place} is too narrow for our {goods}.
        | Floor and heating are new, the wiring is {15-40} years old.

        Rent would be {700-2400/50} euros a month plus {80-240/10} for heating.
        | The owner wants a contract of at least {2-6} years.
        | The present tenant leaves in {month} and would sell us {10-40} {goods}.

        {name} likes it because the bus stops in front; {name} worries about the stairs.
        | We measured {place}: {machine} would not fit through the door.
        | One problem: {problem}.

        Before moving in we would have to repaint and {todo}.
        | {company} could build a wall for {400-1800/100} euros.
        | Two other groups have seen it as well.

        We should answer by {day}.
        | Decision at the next meeting, {day} {time}.
        | My advice: {decision}.
    """,
    "cancellation": """
        Dear all, unfortunately {event} on {day} cannot take place.
        | Hi {name}, I have to cancel our appointment at {time} on {day}.
        | Short notice from {company}: the course on {skill_course} is called off.

        The reason is {reason}, and we could not find a replacement.
        | Only {2-7} people had signed up, and we need at least {8-14}.
        | {name}, who was going to lead it, has to travel to {city}.

        A new date is planned for {month}, probably a {day}.
        | Those who paid get {15-90/5} euros back within {2-4} weeks.
        | Tickets stay valid, or can be returned to {name} until {day}.

        The {goods} that we ordered will be used for {event}.
        | {dish} that was already made goes to {group}.
        | {room} is free that day, in case someone wants it.

        We know that some of you had booked {vehicle} and are sorry for the trouble.
        | This was not an easy choice, as {name} had put {10-40} hours into it.
        | Please pass this on to {name}, who does not read email.

        Let me know by {day} which date suits you.
        | We will write again when we know more.
        | Sorry again and see you soon.
    """,
    "customer_order": """
        Order by phone from {name}, {day} {time}.
        | Special request for {company}, taken by {name}.
        | Booking details for {event}.

        They want {20-90/5} {food_unit} and {10-40/5} {food_unit}, half of them without
          {ingredient}.
        | The order is for {12-60} guests: {dish}, {dish} and {dish}.
        | It is about {30-120/10} {goods} with a printed name.

        One guest cannot eat {ingredient}, another is vegan.
        | Colours should be [green and white|dark blue|yellow|not too bright], like last year.
        | They asked about {menu_item} too; I told them it is {taste}.

        Pick-up is on {day} at {time} by {vehicle}.
        | Delivery goes to {room} at {street} {4-70}, ring twice.
        | Setting up must be finished by {time}.

        I offered a price of {180-900/10} euros, and they want {5-10} percent off.
        | A deposit of {40-150/10} euros is paid, the rest is due on delivery.
        | Last time {problem}, so please double-check.

        {name} confirms by {day}.
        | They will call again on {day} with the final number.
        | Please keep {10-40/5} {goods} aside for them.
    """,
    "survey": """
        Results of the survey among [guests|members|tenants|staff|visitors], {month}.
        | We asked {40-180/5} people about {room}.
        | Feedback collected at {event} by {name}.

        {52-88} percent are happy, {6-14} percent less than last year.
        | Most answers came from people who visit about {2-6} times a month.
        | Only {12-38} forms were filled in, so be careful with the numbers.

        The opening hours got the [best|worst] marks, followed by {machine}.
        | Many praised {name} and the helpful staff.
        | Nearly a third said that {menu_item} is {taste}.

        The most common complaint: {problem}.
        | {5-25} people wrote that it is too [loud|dark|cold|crowded] on {day}s.
        | Young people wish for longer hours, older ones for more [seats|light|parking|quiet].

        Some ideas were new, for example to {decision}.
        | One person offered to {todo} for free.
        | A few comments were about {street} and not about us.

        {name} presents the results on {day}.
        | We will discuss whether to {decision}.
        | The next survey is planned for {month}.
    """,
    "lost_property": """
        Lost and found list, {room}, {month}.
        | Found this week by {name}:
        | Note from the lost property desk.

        {found} was left in {place} on {day} and smells of smoke.
        | {found} turned up behind {machine}.
        | A visitor handed in {found} and {found} at {time}.

        A caller from {city} is looking for {found} and offers {10-50/5} euros.
        | {name} thinks that the owner took part in {event}.
        | The name inside is hard to read, perhaps {name}.

        We keep things for {2-8} weeks and then give them to {group}.
        | Valuable items are locked in {room}; {name} has the code.
        | Food was thrown away at once.

        Please do not hand anything out without a description.
        | Collect things on {day}s before {time}.
        | {name} will {todo} and put up a list.
    """,
    "garden_log": """
        Garden diary, {day}, {3-28} {month}.
        | Allotment notes by {name}, plot {2-60}.
        | State of the beds in {month}:

        {crop} are {10-60/5} cm high and {crop} have started to flower.
        | After {weather} we lost about {4-20} plants, mostly {crop}.
        | We picked {2-14} kg from {crop}, {2-6} kg more than last year.

        {pest} are back, so {name} put a net over {crop}.
        | Yellow leaves on {crop} may come from too much water.
        | The rain barrel is empty and the hose leaks near {place}.

        {name} planted {10-60/5} [onions|tulip bulbs|young leeks|marigolds] along the fence.
        | We turned the compost and spread {3-9} bags on the back bed.
        | {crop} need support, there are {6-20} canes in {place}.

        Watering next week: {name} and {name}.
        | On {day} we cut back {shrub}.
        | Seeds for {month} should be ordered by {day}.
    """,
    "carpool": """
        Carpool to {city}, from {month} on.
        | Ride plan for the week, by {name}.
        | Who drives whom to {event}:

        {name} drives on {day} and {day}, leaving {street} at {time} sharp.
        | There are {3-6} seats in {vehicle} and {2-4} are taken.
        | {name} joins at {street}, which adds {5-20} minutes.

        Fuel is about {20-60/5} euros a week, shared by everybody in the car.
        | Whoever drives does not pay for parking.
        | {name} paid for the last {2-5} trips and gets {15-60/5} euros back.

        On {day} there is no ride because of {reason}.
        | For the way home, meet at {time} in front of {room}.
        | {name} gets car sick and sits in front.

        If you are ill, write to {name} before {time}.
        | New riders are welcome from {month}.
        | Please confirm your days by {day}.
    """,
    "book_club": """
        Book club, {day} evening at {name}'s place.
        | Reading circle notes, {month}.
        | About our last meeting in {room}:

        We talked about {book}, which {3-7} of {8-12} people finished.
        | {name} chose {book} and explained why it matters.
        | {book} split the group: half loved it, half gave up.

        {name} found the ending weak, {name} liked the pictures of {city}.
        | The first {40-120/10} pages are slow, but the middle is gripping.
        | Nobody agreed on whether the narrator tells the truth.

        There was {dish} and too much tea.
        | {name} lent out {2-5} copies and would like them back.
        | We started late because of {reason}.

        Next we read {book}, up to page {90-240/10}.
        | We meet again on {day} at {time}, {name} hosts.
        | Suggestions for {month} go to {name}.
    """,
}
HELD_NOTES = ("lost_property", "garden_log", "carpool", "book_club", "pet_visit")


def parse_note(text):
    """Slots of a note kind, each a list of wordings."""
    slots = re.split(r"\n\s*\n", text.strip())
    return [[" ".join(alt.split()) for alt in re.split(r"\n\s*\|", slot)] for slot in slots]


def note_summary(writer, kind):
    """A short note with a request to summarise it; returns (prompt, note)."""
    rng = writer.rng
    head, *middle, tail = parse_note(NOTE_TEXT[kind])
    while len(middle) > 2 and rng.random() < 0.35:
        middle.pop(int(rng.random() * len(middle)))
    if rng.random() < 0.45:  # a remark beside the point
        middle.insert(int(rng.random() * (len(middle) + 1)), ["{aside}"])
    note = writer.write(" ".join(pick(rng, slot) for slot in (head, *middle, tail)))
    return writer.write("{ask}", {"note": note}).replace(" // ", "\n\n"), note


# ---------------------------------------------------------------------------------------------
# Out of domain, written by hand.
# ---------------------------------------------------------------------------------------------

OOD = (
    ("ood_code", "Write a Python function that returns the second largest value in a list."),
    ("ood_writing", "Write a four-line poem about a lighthouse that has been switched off."),
    ("ood_fact", "Why does the Moon always show the same side to the Earth?"),
    (
        "ood_translation",
        'Translate into French: "The train leaves at seven, and I have not packed yet."',
    ),
    (
        "ood_roleplay",
        "You are a grumpy dragon who guards a library. I come to return a book three years late.",
    ),
    (
        "ood_code",
        "What does this SQL do?\n\n"
        "SELECT city, COUNT(*) FROM riders GROUP BY city HAVING COUNT(*) > 5;",
    ),
    ("ood_writing", "Write a short love letter from a cactus to the rain."),
    ("ood_fact", "Name three rivers that flow through more than one country in Africa."),
    (
        "ood_translation",
        'How do you say "Could you speak a little more slowly?" in Spanish, German and Italian?',
    ),
    (
        "ood_code",
        "Fix this JavaScript:\n\nfunction add(a, b) { retrun a + b }\nconsole.log(add(2 3));",
    ),
    (
        "ood_roleplay",
        "Pretend you are a ship's cook in 1780 and tell me about your worst day at sea.",
    ),
    ("ood_fact", "What is the difference between a virus and a bacterium?"),
    (
        "ood_writing",
        "Continue this story: The elevator opened on a floor that had no number, and",
    ),
    (
        "ood_code",
        "Write a shell command that counts the lines in every .txt file below the current folder.",
    ),
    ("ood_opinion", "Is it better to live in a big city or by the sea? Argue for both sides."),
    ("ood_writing", "Write a haiku about a fax machine."),
)

# ---------------------------------------------------------------------------------------------
# Machinery.
# ---------------------------------------------------------------------------------------------

MONEY = ("${}", "{} euros", "£{}", "{} dollars", "€{}", "{} euros", "${}", "{} pounds")
# fmt: off
NUMBER_WORDS = (
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)
# fmt: on
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth"}
SLOT = re.compile(r"\{([^{}]*)\}")
CHOICE = re.compile(r"\[([^\[\]]*)\]")
RANGE = re.compile(r"(\d+)-(\d+)(?:/(\d+))?$")


def pick(rng, options):
    """One of `options`. Only rng.random() is used, to stay the same between Python versions."""
    return options[int(rng.random() * len(options))]


def pick_number(rng, low, high, step=1):
    """A number of low, low + step, ... up to high."""
    return pick(rng, range(low, high + 1, step))


def shuffled(rng, items):
    """A shuffled copy of `items`."""
    return [item for _, _, item in sorted((rng.random(), i, item) for i, item in enumerate(items))]


def split_entries(text):
    """Entries of a bank, with line breaks of the source taken out."""
    return tuple(" ".join(entry.split()) for entry in re.split(r";\s", text.strip()))


BANKS = {name: split_entries(text) for name, text in BANK_TEXT.items()}
BANKS |= {f"constraint_{name}": split_entries(text) for name, text in CONSTRAINTS.items()}


def held_entries(name):
    """The entries of a bank that only held-out rows may use."""
    shared = name in SHARED_BANKS or name.startswith("constraint_") or len(BANKS[name]) < 6
    return () if shared else BANKS[name][5::6]


def bank_for(name, held):
    """The entries that a row may use: the held-out ones, or all the others."""
    kept = held_entries(name)
    if held and kept:
        return kept
    return tuple(entry for entry in BANKS[name] if entry not in kept)


class Decks:
    """Draws from banks like from decks of cards: every entry once before any comes again."""

    def __init__(self, rng):
        """Starts with no deck; each is made when first drawn from."""
        self.rng = rng
        self.cards = {}

    def draw(self, key, entries, avoid=()):
        """The next entry that is not in `avoid` (any entry, if all are)."""
        cards = self.cards.setdefault(key, [])
        if not any(card not in avoid for card in cards):
            cards.extend(shuffled(self.rng, entries))
        place = next((i for i, card in enumerate(cards) if card not in avoid), 0)
        return cards.pop(place)


class Writer:
    """Fills the templates of one row.

    `[a|b]` picks one part. `{bank}` draws an entry that the row has not used yet, `{bank.x}` draws
    once and then repeats it. `{3-9}` and `{20-80/5}` are numbers. `{k}`, `{k$}` and `{k/}` show a
    value as a number, an amount of money and a fraction.
    """

    def __init__(self, rng, decks, held_words, held_style):
        """`held_words` and `held_style` say if the row takes held-out words and held-out frames."""
        self.rng, self.decks = rng, decks
        self.held_words, self.held_style = held_words, held_style
        self.kept, self.used = {}, set()
        self.money = pick(rng, MONEY)
        self.spell = rng.random() < 0.3

    def write(self, template, values=(), tidy=True):
        """The template with all choices made and all slots filled."""
        text, values = template, dict(values)
        while CHOICE.search(text) or SLOT.search(text):
            while CHOICE.search(text):
                text = CHOICE.sub(lambda m: pick(self.rng, m.group(1).split("|")), text)
            text = SLOT.sub(lambda m: self.fill(m.group(1), values), text)
        return tidy_text(text) if tidy else text

    def fill(self, key, values):
        """The text for one slot."""
        if key.rstrip("$/") in values:
            return self.show(key, values[key.rstrip("$/")])
        if match := RANGE.match(key):
            return str(pick_number(self.rng, *(int(part) for part in match.groups("1"))))
        if "." in key:
            if key not in self.kept:
                self.kept[key] = self.draw_from(key.split(".")[0])
            return self.kept[key]
        return self.draw_from(key)

    def show(self, key, value):
        """A value given by the caller, as its slot asks."""
        if key.endswith("$"):
            return self.money.format(value)
        if key.endswith("/"):
            return FRACTIONS[value]
        if self.spell and isinstance(value, int) and 2 <= value <= 12:
            return NUMBER_WORDS[value - 2]
        return str(value)

    def draw_from(self, bank):
        """An entry of a bank that this row has not used."""
        held = self.held_style if bank in STYLE_BANKS else self.held_words
        word = self.decks.draw((bank, held), bank_for(bank, held), self.used)
        self.used.add(word)
        return word


def tidy_text(text):
    """Single spaces, and capitals where sentences begin."""
    text = re.sub(r" +", " ", text).strip()
    return re.sub(r"(^|[.?!]\s+|\n)([a-z])", lambda m: m.group(1) + m.group(2).upper(), text)


MAKERS = {"how_to": how_to, "word_problem": word_problem, "note_summary": note_summary}
TEMPLATES = {
    "how_to": (tuple(FAMILIES) + OFTEN, HELD_FAMILIES),
    "word_problem": (tuple(STORIES), HELD_STORIES),
    "note_summary": (tuple(NOTE_TEXT), HELD_NOTES),
}


def trigrams(text):
    """The set of word trigrams of a text."""
    words = re.findall(r"\w+", text.lower())
    return set(zip(words, words[1:], words[2:], strict=False))


def overlap(first, second):
    """Jaccard similarity of two sets."""
    return len(first & second) / max(1, len(first | second))


def held_pattern():
    """Matches any held-out entry of the divided word banks as a whole phrase."""
    entries = {entry for name in BANKS if name not in STYLE_BANKS for entry in held_entries(name)}
    entries = {re.sub(r"^(a|an|the) ", "", entry) for entry in entries if "{" not in entry}
    longest_first = sorted(entries, key=lambda entry: (-len(entry), entry))
    return re.compile(r"\b(" + "|".join(map(re.escape, longest_first)) + r")\b", re.IGNORECASE)


def plan(rng, category, held, count):
    """Which template each attempt uses: all in turn, in a new order each round."""
    every, kept = TEMPLATES[category]
    common = [name for name in every if name not in kept]
    order = []
    while len(order) < count:
        order += shuffled(rng, kept if held else common)
    return order


def suits(category, text, body, seen, banned):
    """True if the row has a fitting length, no banned phrase, and is not too close to another."""
    low, high = WORDS[category]
    if not low <= len(body.split()) <= high or (banned and banned.search(text)):
        return False
    grams = trigrams(body)
    return all(overlap(grams, other) <= MAX_OVERLAP[category] for other in seen)


def make_texts(seed, split, category, count, seen, banned=None):
    """`count` accepted prompts of one category; adds their trigrams to `seen`."""
    rng = random.Random(f"{seed}/{split}/{category}")
    heldout = split == "heldout"
    decks = Decks(rng)
    plans = {held: plan(rng, category, held, 60 * count) for held in (True, False)}
    texts = []
    while len(texts) < count:
        held_template = heldout and len(texts) % 2 == 0
        template = plans[held_template].pop(0)
        writer = Writer(rng, decks, held_words=heldout, held_style=held_template)
        text, body = MAKERS[category](writer, template)
        if suits(category, text, body, seen, banned):
            texts.append(text)
            seen.append(trigrams(body))
    return texts


def row(identifier, category, text):
    """One row of a prompt file."""
    return {"id": identifier, "category": category, "messages": [{"role": "user", "content": text}]}


def make_split(seed, split, count, seen, banned=None):
    """Rows of one split, the categories in turn."""
    each = count // len(CATEGORIES)
    columns = [make_texts(seed, split, c, each, seen[c], banned) for c in CATEGORIES]
    pairs = [
        pair for turn in zip(*columns, strict=True) for pair in zip(CATEGORIES, turn, strict=True)
    ]
    return [row(f"{split}-{i:04d}", category, text) for i, (category, text) in enumerate(pairs)]


def make_all(seed):
    """All three files as {name: rows}; held-out rows come first, training keeps clear of them."""
    seen = {category: [] for category in CATEGORIES}
    heldout = make_split(seed, "heldout", HELDOUT_ROWS, seen)
    train = make_split(seed, "train", TRAIN_ROWS, seen, held_pattern())
    ood = [row(f"ood-{i:04d}", category, text) for i, (category, text) in enumerate(OOD)]
    return {"train": train, "heldout": heldout, "ood": ood}


def content(record):
    """The prompt of a row."""
    return record["messages"][0]["content"]


def check(files):
    """Raises AssertionError unless the files keep what the docstring promises."""
    rows = [record for records in files.values() for record in records]
    assert len({record["id"] for record in rows}) == len(rows), "an id occurs twice"
    folded = {" ".join(content(record).lower().split()) for record in rows}
    assert len(folded) == len(rows), "a prompt occurs twice"
    banned = held_pattern()
    leaks = [record["id"] for record in files["train"] if banned.search(content(record))]
    assert not leaks, f"held-out words in {leaks}"
    for split in ("train", "heldout"):
        turns = [record["category"] for record in files[split]]
        assert turns == list(CATEGORIES) * (len(turns) // len(CATEGORIES)), "categories not in turn"


def distinct(texts, n):
    """Different word n-grams as a share of all word n-grams."""
    grams = []
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        grams += zip(*(words[i:] for i in range(n)), strict=False)
    return len(set(grams)) / max(1, len(grams))


def nearest(texts, others):
    """For each text, its largest trigram overlap with the others; returns (mean, largest)."""
    sets = [trigrams(text) for text in others]
    best = []
    for text in texts:
        grams = trigrams(text)
        best.append(
            max(overlap(grams, s) for s, other in zip(sets, others, strict=True) if other != text)
        )
    return sum(best) / len(best), max(best)


def statistics(files):
    """Lines that describe the files."""
    yield "split    category       rows  words/row  vocabulary  distinct-1 -2 -3 -4        nearest train"
    train = {c: [content(r) for r in files["train"] if r["category"] == c] for c in CATEGORIES}
    for split in ("train", "heldout"):
        for category in CATEGORIES:
            texts = [content(r) for r in files[split] if r["category"] == category]
            yield describe(split, category, texts, train[category])
    yield describe(
        "ood",
        "all",
        [content(r) for r in files["ood"]],
        [text for texts in train.values() for text in texts],
    )


def describe(split, category, texts, others):
    """One line of statistics."""
    lengths = [len(text.split()) for text in texts]
    vocabulary = len({word for text in texts for word in re.findall(r"[a-z]+", text.lower())})
    grams = " ".join(f"{distinct(texts, n):.3f}" for n in (1, 2, 3, 4))
    mean, largest = nearest(texts, others)
    size = f"{min(lengths)}-{sum(lengths) / len(lengths):.0f}-{max(lengths)}"
    return (
        f"{split:8} {category:13} {len(texts):5}  {size:>9}  {vocabulary:10}  {grams}"
        f"   mean {mean:.2f}, max {largest:.2f}"
    )


def write_files(files, folder):
    """Writes prompts_<name>.jsonl for each of the files."""
    for name, records in files.items():
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        path = folder / f"prompts_{name}.jsonl"
        path.write_text("".join(lines), encoding="utf-8", newline="\n")


def main():
    """Makes, checks and writes the files, then prints statistics."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out-dir", type=Path, default=Path(__file__).resolve().parent)
    args = parser.parse_args()
    files = make_all(args.seed)
    check(files)
    write_files(files, args.out_dir)
    print("\n".join(statistics(files)))


if __name__ == "__main__":
    main()
