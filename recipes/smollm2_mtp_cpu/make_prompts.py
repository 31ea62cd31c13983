"""Writes the demo workload: prompts a household or small team could send to its assistant.

    python make_prompts.py --seed 0

makes three files beside this script (`--out-dir` puts them elsewhere), with rows of the form
`{"id": ..., "category": ..., "messages": [{"role": "user", "content": ...}]}`:

  prompts_train.jsonl     1200 rows in two categories: how_to, word_problem
  prompts_heldout.jsonl     48 rows, the same two categories
  prompts_ood.jsonl         24 rows from outside that workload, written by hand (ood_*)

The two categories take turns, so every prefix of a file holds them in equal share; every third row
of prompts_ood.jsonl is a note to summarise (ood_note). All text here was written for this recipe;
nothing is copied from a data set. The same seed and the same script give the same bytes: choices
use only `random.random()`, whose sequence Python keeps between versions.
The word problems have whole-number answers at every step (checked as they are drawn; the answers
are not written out, since training uses the model's own replies).

What is held out (prompts_heldout.jsonl against prompts_train.jsonl):

  * Words. Every sixth entry of each word bank with six or more entries (people, companies, objects,
    dishes, faults, cities, whole how-to tasks, ...) is kept for the held-out file. Calendar words
    and the few banks named in SHARED_BANKS are not divided. A training row in which a held-out
    entry turns up by another way, as a whole phrase, is thrown away.
  * Templates. The how-to families in HELD_FAMILIES and the story shapes in HELD_STORIES occur in
    no training row. In each category of the held-out file, rows 0, 2, 4, ... use these, with the
    question frames, leads and endings that STYLE_BANKS keeps for them; rows 1, 3, 5, ... use
    templates and frames that training has too, but held-out words. (Constraints such as "without
    a drill" and the words written into a template are not divided.)
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
OOD_ROWS = 24
CATEGORIES = ("how_to", "word_problem")
# A row is refused when it shares more than this part of its word trigrams with an earlier row.
MAX_OVERLAP = {"how_to": 0.40, "word_problem": 0.36}
# Fewest and most words in a prompt (for ood_note, in the note without the request).
WORDS = {"how_to": (5, 30), "word_problem": (20, 55), "ood_note": (40, 90)}

# ---------------------------------------------------------------------------------------------
# Word banks. Entries are parted by ";". Every sixth entry of a bank is held out.
# ---------------------------------------------------------------------------------------------

BANK_TEXT = {
    # Shared by both categories.
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
    # Word problems.
    "goods": """folding chairs; toner cartridges; coffee beans; desk lamps; fleece blankets;
        cardboard boxes; paint rollers; flour sacks; shower curtains; safety gloves; wine glasses;
        oat milk cartons; ceiling tiles; garden hoses; hand towels; name badges; extension leads;
        freezer bags; door locks; first-aid kits; ring binders; apple juice crates; floor mats;
        bike helmets; whiteboard pens; soup bowls; dust masks; bamboo canes; tea towels; wall
        brackets; compost bags; serving trays""",
    "reason": """a burst pipe; a family matter; a train strike; illness; a power cut; roadworks on
        {street}; a booking mistake; low numbers; heavy rain; a late delivery; a broken lift; a
        school holiday; a lost key; a staff shortage; bad weather; a software update; a fire drill;
        a clash with {event}""",
}

SHARED_BANKS = {"day", "month", "time", "span"}  # not divided into train and held-out
# In these, held-out entries go with held-out templates only.
STYLE_BANKS = {"frame", "lead", "home_lead", "ending"}

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
    return text


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
            return values


def word_problem(writer, name):
    """One arithmetic story of two or three steps."""
    values = draw_numbers(writer.rng, name)
    text = writer.write(pick(writer.rng, STORIES[name][2]), values)
    if writer.rng.random() < 0.2:
        text = pick(writer.rng, OPENINGS) + text
    elif writer.rng.random() < 0.25:
        text += pick(writer.rng, CLOSINGS)
    return text


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
# Out of domain, written by hand.
# ---------------------------------------------------------------------------------------------

OOD = (
    ("ood_code", "Write a Python function that returns the second largest value in a list."),
    ("ood_writing", "Write a four-line poem about a lighthouse that has been switched off."),
    (
        "ood_note",
        "Minutes of the allotment committee, Thursday. The water bill went up by 40 euros"
        " because the tap behind plot 12 had been leaking since May. Ari has changed the washer."
        " We agreed to buy a second rain barrel, but only if the town pays half of it. Three"
        " people are on the waiting list, and plot 7 will be free in October. The seed swap"
        " moves to the last Sunday of the month. Noor is still looking for the key to the shed.\n\n"
        "Summarise the note above in two sentences.",
    ),
    ("ood_fact", "Why does the Moon always show the same side to the Earth?"),
    (
        "ood_translation",
        'Translate into French: "The train leaves at seven, and I have not packed yet."',
    ),
    (
        "ood_note",
        "Handover for the late shift: the dishwasher stopped twice with error 24 and only ran"
        " again after a reset. A technician comes tomorrow between nine and eleven, so please"
        " leave the side door unlocked. Until then, wash the glasses by hand. Table 6 is booked"
        " for a birthday, twelve people, two of them without gluten. There is fresh soup for the"
        " staff in the blue pot.\n\n"
        "What are the main points? Two sentences, please.",
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
    (
        "ood_note",
        "Hi Robin, thank you for looking after Pickle while we are away. He gets one scoop of"
        " food in the morning and one at night, never more, whatever he tells you. His drops are"
        " in the fridge door; give him three on Monday and three on Thursday. He hides under the"
        " bed when it thunders, just leave him there. If he stops eating, call the vet, the"
        " number is on the calendar. We are back on Sunday evening.\n\n"
        "Give me the gist of this in a single sentence.",
    ),
    ("ood_writing", "Write a short love letter from a cactus to the rain."),
    ("ood_fact", "Name three rivers that flow through more than one country in Africa."),
    (
        "ood_note",
        "To all flats: the lift will be out of use from Tuesday to Friday because both cables"
        " are being replaced. The work starts at eight and will be noisy on the upper floors."
        " Anyone who cannot manage the stairs should ring the office by Monday, and we will find"
        " help with shopping and bins. Deliveries can be left in the bike room, which will stay"
        " open during the day.\n\n"
        "Could you shorten this for the notice board? One or two sentences.",
    ),
    (
        "ood_translation",
        'How do you say "Could you speak a little more slowly?" in Spanish, German and Italian?',
    ),
    (
        "ood_code",
        "Fix this JavaScript:\n\nfunction add(a, b) { retrun a + b }\nconsole.log(add(2 3));",
    ),
    (
        "ood_note",
        "Trip report, day two. We missed the early ferry since the bus from the hotel came"
        " twenty minutes late, and the next one only left at noon. So the lighthouse had to"
        " wait, and we walked along the cliffs instead. Sam found a bakery that sells warm"
        " cheese bread. My left boot is coming apart. Tomorrow we take the coach north, and"
        " somebody has to book beds for four.\n\n"
        "TL;DR in two sentences.",
    ),
    (
        "ood_roleplay",
        "Pretend you are a ship's cook in 1780 and tell me about your worst day at sea.",
    ),
    ("ood_fact", "What is the difference between a virus and a bacterium?"),
    (
        "ood_note",
        "Update on the booking site: it was down on Wednesday from 14:10 to 15:45. The cause"
        " was a full disk; old log files had not been deleted since a setting was changed in"
        " March. No payments were lost, but nine customers were charged twice and have their"
        " money back. From now on a warning goes out when the disk is 80 percent full. Kim will"
        " write to the customers today.\n\n"
        "In brief: what happened, and what comes next?",
    ),
    (
        "ood_writing",
        "Continue this story: The elevator opened on a floor that had no number, and",
    ),
    (
        "ood_code",
        "Write a shell command that counts the lines in every .txt file below the current folder.",
    ),
    (
        "ood_note",
        "Quote for the kitchen floor. Taking out the old tiles costs 380 euros, and laying new"
        " ones 1,150 with material. If we choose vinyl, it is 700 altogether and done in one day"
        " rather than three. The room cannot be used while the glue dries. They could begin in"
        " the second week of June, but want a deposit of a fifth by the end of this month. Jules"
        " prefers tiles, I don't mind.\n\n"
        "Sum this up in at most 30 words, and keep the prices.",
    ),
    ("ood_opinion", "Is it better to live in a big city or by the sea? Argue for both sides."),
    ("ood_writing", "Write a haiku about a fax machine."),
    (
        "ood_note",
        "Feedback on Saturday's street market. We sold all 60 jars of plum jam before eleven"
        " and could have sold twice as many. The chutney hardly moved, perhaps because nobody"
        " was able to taste it. Our stand was hard to find behind the stage, so next time we"
        " should ask for a place near the fountain. The cash box was four euros short. Dana has"
        " offered to draw a bigger sign.\n\n"
        "Please write a short summary of two sentences for those who were not there.",
    ),
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
    shared = name in SHARED_BANKS or name.startswith("constraint_")
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
    once and then repeats it. `{k}`, `{k$}` and `{k/}` show a value as a number, an amount of money
    and a fraction.
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
    return re.sub(r"(^|[.?!]\s+)([a-z])", lambda m: m.group(1) + m.group(2).upper(), text)


MAKERS = {"how_to": how_to, "word_problem": word_problem}
TEMPLATES = {
    "how_to": (tuple(FAMILIES) + OFTEN, HELD_FAMILIES),
    "word_problem": (tuple(STORIES), HELD_STORIES),
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


def suits(category, text, seen, banned):
    """True if the row has a fitting length, no banned phrase, and is not too close to another."""
    low, high = WORDS[category]
    if not low <= len(text.split()) <= high or (banned and banned.search(text)):
        return False
    grams = trigrams(text)
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
        text = MAKERS[category](writer, template)
        if suits(category, text, seen, banned):
            texts.append(text)
            seen.append(trigrams(text))
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
    for split, count in (("train", TRAIN_ROWS), ("heldout", HELDOUT_ROWS)):
        turns = [record["category"] for record in files[split]]
        assert turns == list(CATEGORIES) * (count // len(CATEGORIES)), "categories not in turn"
    turns = [record["category"] == "ood_note" for record in files["ood"]]
    assert turns == [False, False, True] * (OOD_ROWS // 3), "not every third row is a note"
    for record in rows:
        if limits := WORDS.get(record["category"]):
            words = len(content(record).split("\n\n")[0].split())
            assert limits[0] <= words <= limits[1], f"length of {record['id']}"


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
    everything = [text for texts in train.values() for text in texts]
    for category, note in (("ood_note", True), ("others", False)):
        texts = [content(r) for r in files["ood"] if (r["category"] == "ood_note") == note]
        yield describe("ood", category, texts, everything)


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
